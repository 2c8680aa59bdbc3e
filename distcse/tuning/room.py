"""How many trials fit in the cluster at a time, and what each of them is given."""

from __future__ import annotations

from dataclasses import dataclass

import ray

from distcse.errors import RunError
from distcse.recipe import MutualRecipe, Recipe, Sweep, TrackSection
from distcse.teachers import uses_table

_AROUND_A_TRAINER = 0.01
"""CPUs of a trial's process whose workers are others."""
_ROUNDING = 1e-6


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
        return {"CPU": self.cpus, "GPU": self.gpus} if self.in_own_process else {"CPU": _AROUND_A_TRAINER}


def room_of(recipe: Recipe | MutualRecipe, sweep: Sweep) -> Room:
    """As many trials as the cluster has CPUs and GPUs for, each with an even share of the CPUs.

    `training.cpus_per_worker` and `gpus_per_worker` of the recipe count, also fractions: 0.5 lets two trials share a core or GPU.
    A mutual distillation runs its groups in turns in the trial's process.

    Raises:
        RunError: The trials at a time that were asked for do not fit.
    """
    has = ray.cluster_resources()
    serving = _live_servers(recipe)
    cpus = has.get("CPU", 1.0) - serving
    gpus = has.get("GPU", 0.0) - (serving * recipe.teachers.builder_gpus if isinstance(recipe, Recipe) else 0.0)
    training = recipe.training if isinstance(recipe, Recipe) else None
    workers = training.workers if training else 0
    cpu = training.cpus_per_worker if training else None
    gpu = training.gpus_per_worker if training and training.gpus_per_worker is not None else float(gpus >= 1)
    each, around = max(1, workers), _AROUND_A_TRAINER if workers > 1 else 0.0
    fitting = _times(cpus, (cpu or 1) * each + around)
    if gpu:
        fitting = min(fitting, _times(gpus, gpu * each))
    concurrent = sweep.search.concurrent or max(1, fitting)
    cpus -= around * concurrent
    together = each * concurrent
    cpu = cpu or max(1.0, cpus // together)
    if cpu * together > cpus + _ROUNDING or gpu * together > gpus + _ROUNDING:
        raise RunError(
            f"{concurrent} trials at a time need {cpu * together:g} CPUs and {gpu * together:g} GPUs, the cluster has {cpus:g} "
            f"and {gpus:g} for them; lower search.concurrent, training.workers or training.cpus_per_worker and gpus_per_worker"
        )
    return Room(concurrent, cpu, gpu, workers)


def given(recipe: Recipe | MutualRecipe, room: Room) -> Recipe | MutualRecipe:
    """The recipe as trials run it: with a share of the cluster, nothing measured at their end, no trackers but the sweep's."""
    alike = {"evaluation": recipe.evaluation.model_copy(update={"final": []}), "track": TrackSection()}
    if isinstance(recipe, MutualRecipe):
        return recipe.model_copy(update={**alike, "ray": False})
    share = {"cpus_per_worker": room.cpus, "gpus_per_worker": room.gpus}
    return recipe.model_copy(update={**alike, "training": recipe.training.model_copy(update=share)})


def _times(there: float, each: float) -> int:
    """How often something fits; a tenth fits ten times."""
    return int(there / each + _ROUNDING)


def _live_servers(recipe: Recipe | MutualRecipe) -> int:
    """Servers of live teachers, which keep a CPU each, and their GPUs, to themselves."""
    if isinstance(recipe, MutualRecipe):
        return 0
    section = recipe.teachers
    return sum(section.servers for teacher in section.encoders if not uses_table(section, teacher))
