"""How many trials fit in the cluster at a time, and what each of them is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distcse.errors import ClusterTooSmallError
from distcse.ray_backend.gpu_shortfall import GpuRole, lost_gpus
from distcse.ray_backend.nodes import (
    Node,
    ResourceRequest,
    Resources,
    even_share,
    fitting,
    format_nodes,
    format_resources,
    nodes_with,
)
from distcse.recipe import LoggersSection, MutualRecipe, Recipe, Sweep
from distcse.teachers.gpus import builder_roles, server_roles
from distcse.teachers.servers import server_demands

_AROUND_A_TRAINER = 0.01
"""CPUs of a trial's process whose workers are others."""


@dataclass(frozen=True)
class TrialResources:
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


def trial_resources(
    recipe: Recipe | MutualRecipe, sweep: Sweep, nodes: Sequence[Resources] | None = None
) -> TrialResources:
    """As many trials as the cluster has CPUs and GPUs for, each with an even share of the CPUs.

    `training.cpus_per_worker` and `gpus_per_worker` of the recipe count, also fractions: 0.5 lets two trials share a core or GPU.
    A mutual distillation runs its groups in turns in the trial's process. No worker lies on two nodes.

    Args:
        recipe: What is tried.
        sweep: How many at a time, where it says so.
        nodes: What each node has; None asks the cluster.

    Raises:
        RunError: The trials at a time that were asked for do not fit.
    """
    has = nodes_with(None, "training.node_labels") if nodes is None else nodes
    training = recipe.training if isinstance(recipe, Recipe) else None
    left = _without_servers(recipe, has)
    workers = training.workers if training else 0
    each, around = max(1, workers), _AROUND_A_TRAINER if workers > 1 else 0.0
    cpu = training.cpus_per_worker if training else None
    wants_gpu = training.gpus_per_worker if training else None
    gpu = float(any(node.get("GPU", 0.0) >= 1 for node in left)) if wants_gpu is None else wants_gpu
    left = [node for node in left if not gpu or node.get("GPU", 0.0) >= gpu]
    fits = fitting(left, {"CPU": (cpu or 1) + around / each, "GPU": gpu}) // each
    concurrent = sweep.search.concurrent or max(1, fits)
    together = each * concurrent
    left = _without(left, concurrent, {"CPU": around})
    cpu = cpu or max(1.0, float(int(even_share([node.get("CPU", 0.0) for node in left], together))))
    one = {"CPU": cpu, "GPU": gpu}
    if fitting(left, one) < together:
        raise ClusterTooSmallError(
            f"{concurrent} trials at a time want room for {together} training workers of {format_resources(one)} each, and none "
            f"lies on two nodes: {format_nodes(left)} left for them, room for {fitting(left, one)}; lower search.concurrent, "
            "training.workers or training.cpus_per_worker and gpus_per_worker"
        )
    return TrialResources(concurrent, cpu, gpu, workers)


def lost_gpus_of_trials(
    recipe: Recipe | MutualRecipe, sweep: Sweep, room: TrialResources, nodes: Sequence[Node]
) -> list[str]:
    """A warning for every role of a sweep that gets none of the GPUs of its nodes. See `trial_resources` for the arguments."""
    if isinstance(recipe, MutualRecipe):  # no other process takes a GPU from its trials
        return []
    number = max(1, room.workers) * (sweep.search.concurrent or 1)
    each, keys = {"CPU": room.cpus, "GPU": room.gpus}, {"GPU": "training.gpus_per_worker"}
    trials = GpuRole(
        name="the trials",
        demand=ResourceRequest("the trials", number, each, None, "sweep.search.concurrent", keys),
        is_decided=recipe.training.gpus_per_worker is not None,
        takes_whole=True,
        rule="a trial needs a node with 1 free GPU",
    )
    together = [trials, *server_roles(recipe.teachers, reads_tables_itself=room.in_own_process)]
    return [*lost_gpus(builder_roles(recipe.teachers, nodes), nodes), *lost_gpus(together, nodes)]


def trial_recipe(recipe: Recipe | MutualRecipe, room: TrialResources) -> Recipe | MutualRecipe:
    """The recipe as trials run it: with a share of the cluster, nothing measured at their end, no trackers but the sweep's."""
    alike = {"evaluation": recipe.evaluation.model_copy(update={"final_suites": []}), "loggers": LoggersSection()}
    if isinstance(recipe, MutualRecipe):
        return recipe.model_copy(update={**alike, "ray": False})
    alike["evaluation"] = recipe.evaluation.model_copy(update={"final_suites": [], "async_eval": None})
    share = {"cpus_per_worker": room.cpus, "gpus_per_worker": room.gpus}
    return recipe.model_copy(update={**alike, "training": recipe.training.model_copy(update=share)})


def _without_servers(recipe: Recipe | MutualRecipe, nodes: Sequence[Resources]) -> list[Resources]:
    """What the teachers' servers leave: what they take they keep to themselves."""
    if isinstance(recipe, MutualRecipe):
        return list(nodes)
    left = list(nodes)
    for demand in server_demands(recipe.teachers):
        left = _without(left, demand.number, demand.each)
    return left


def _without(nodes: Sequence[Resources], number: int, each: Resources) -> list[Resources]:
    """What so many of something leave on nodes, each put where most CPUs are left."""
    left = [dict(node) for node in nodes]
    for _ in range(number):
        most = max(left, key=lambda node: node.get("CPU", 0.0), default={})
        most.update({kind: max(0.0, most.get(kind, 0.0) - amount) for kind, amount in each.items() if amount})
    return list(left)
