"""How many trials fit in the cluster at a time, and what each of them is given."""

from __future__ import annotations

from dataclasses import dataclass

import ray

from distcse.errors import RunError
from distcse.recipe import MutualRecipe, Recipe, Sweep
from distcse.teachers import uses_table


@dataclass(frozen=True)
class Room:
    """How many trials run at a time, and what one of them is given."""

    concurrent: int
    cpus: float
    """CPUs of one training worker."""
    gpus: float
    """GPUs, or a fraction of one, of one training worker."""
    workers: int
    """Training workers of one trial; with one or none the trial trains in its own process."""

    @property
    def in_own_process(self) -> bool:
        """Whether a trial needs no trainer around its worker."""
        return self.workers <= 1

    @property
    def reserved(self) -> dict[str, float]:
        """What a trial's own process reserves: next to nothing where a trainer reserves for its workers."""
        return {"CPU": self.cpus, "GPU": self.gpus} if self.in_own_process else {"CPU": 0.01}


def room_of(recipe: Recipe | MutualRecipe, sweep: Sweep) -> Room:
    """As many trials as the cluster has GPUs (or CPUs) for, each with an even share of the CPUs.

    `training.cpus_per_worker` and `gpus_per_worker` of the recipe count, also fractions: 0.5 lets two trials share a core or GPU.
    A mutual distillation runs its groups in turns in the trial's process.

    Raises:
        RunError: The trials at a time that were asked for do not fit.
    """
    has = ray.cluster_resources()
    gpus = has.get("GPU", 0.0)
    cpus = has.get("CPU", 1.0) - _serving(recipe)
    training = recipe.training if isinstance(recipe, Recipe) else None
    workers = training.workers if training else 0
    cpu = training.cpus_per_worker if training else None
    gpu = training.gpus_per_worker if training and training.gpus_per_worker is not None else float(gpus > 0)
    each = max(1, workers)
    fitting = gpus // (gpu * each) if gpu else cpus // ((cpu or 1) * each)
    concurrent = sweep.search.concurrent or max(1, int(fitting))
    cpu = cpu or max(1.0, cpus // (concurrent * each))
    together = each * concurrent
    if cpu * together > cpus or gpu * together > gpus:
        raise RunError(
            f"{concurrent} trials at a time need {cpu * together:g} CPUs and {gpu * together:g} GPUs, the cluster has {cpus:g} "
            f"and {gpus:g} for them; lower search.concurrent, training.workers or training.cpus_per_worker and gpus_per_worker"
        )
    return Room(concurrent, cpu, gpu, workers)


def given(recipe: Recipe | MutualRecipe, room: Room) -> Recipe | MutualRecipe:
    """The recipe as trials run it: with their share of the cluster, and nothing measured at their end."""
    evaluation = recipe.evaluation.model_copy(update={"final": []})
    if isinstance(recipe, MutualRecipe):
        return recipe.model_copy(update={"evaluation": evaluation, "ray": False})
    share = {"cpus_per_worker": room.cpus, "gpus_per_worker": room.gpus}
    return recipe.model_copy(update={"evaluation": evaluation, "training": recipe.training.model_copy(update=share)})


def _serving(recipe: Recipe | MutualRecipe) -> int:
    """CPUs that live teachers keep to themselves."""
    if isinstance(recipe, MutualRecipe):
        return 0
    section = recipe.teachers
    return sum(section.servers for teacher in section.encoders if not uses_table(section, teacher))
