"""Decides how many trials run at once in the cluster, and the resources of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distcse.errors import ClusterTooSmallError
from distcse.ray_backend.gpu_shortfall import GpuRole, lost_gpus
from distcse.ray_backend.nodes import (
    Node,
    ResourceRequest,
    Resources,
    count_fitting,
    even_share,
    format_nodes,
    format_resources,
    nodes_with,
)
from distcse.recipe import LoggersSection, MutualRecipe, Recipe, Sweep
from distcse.teachers.gpus import builder_roles, server_roles
from distcse.teachers.servers import server_demands

_TRAINER_CPUS = 0.01
"""CPUs that a trial's process reserves if it trains in separate worker processes."""


@dataclass(frozen=True)
class TrialResources:
    """How many trials run at once, and the resources of one trial."""

    concurrent: int
    """Trials that run at once."""
    cpus: float
    """CPUs of one training worker."""
    gpus: float
    """GPUs, or a fraction of one, of one training worker."""
    workers: int
    """Training workers of one trial; with 0 or 1, the trial trains in its own process."""

    @property
    def in_own_process(self) -> bool:
        """Whether a trial trains in its own process, without a Ray Train trainer."""
        return self.workers <= 1

    @property
    def reserved(self) -> dict[str, float]:
        """What a trial's process reserves: almost nothing if a trainer reserves for its workers."""
        return {"CPU": self.cpus, "GPU": self.gpus} if self.in_own_process else {"CPU": _TRAINER_CPUS}


def trial_resources(
    recipe: Recipe | MutualRecipe, sweep: Sweep, nodes: Sequence[Resources] | None = None
) -> TrialResources:
    """Return how many trials fit into the cluster's CPUs and GPUs, and an even share of the CPUs for each.

    `training.cpus_per_worker` and `gpus_per_worker` may be fractions: with 0.5, two trials share a core or GPU. A mutual
    distillation trains its groups one after the other in the trial's process. No worker spans two nodes.

    Args:
        recipe: The sweep's recipe.
        sweep: `search.concurrent` sets the number of trials; null is as many as fit.
        nodes: Resources of each node; None reads the cluster's.

    Raises:
        ClusterTooSmallError: `search.concurrent` trials do not fit.
    """
    available = nodes_with(None, "training.node_labels") if nodes is None else nodes
    training = recipe.training if isinstance(recipe, Recipe) else None
    left = _without_servers(recipe, available)
    workers = training.workers if training else 0
    each, trainer_cpus = max(1, workers), _TRAINER_CPUS if workers > 1 else 0.0
    cpu = training.cpus_per_worker if training else None
    wants_gpu = training.gpus_per_worker if training else None
    gpu = float(any(node.get("GPU", 0.0) >= 1 for node in left)) if wants_gpu is None else wants_gpu
    left = [node for node in left if not gpu or node.get("GPU", 0.0) >= gpu]
    fits = count_fitting(left, {"CPU": (cpu or 1) + trainer_cpus / each, "GPU": gpu}) // each
    concurrent = sweep.search.concurrent or max(1, fits)
    total_workers = each * concurrent
    left = _without(left, concurrent, {"CPU": trainer_cpus})
    cpu = cpu or max(1.0, float(int(even_share([node.get("CPU", 0.0) for node in left], total_workers))))
    one = {"CPU": cpu, "GPU": gpu}
    if count_fitting(left, one) < total_workers:
        raise ClusterTooSmallError(
            f"{concurrent} concurrent trials need {total_workers} training workers of {format_resources(one)} each, none of them "
            f"across nodes, but the free resources ({format_nodes(left)}) fit {count_fitting(left, one)}; lower "
            "search.concurrent, training.workers, training.cpus_per_worker or training.gpus_per_worker"
        )
    return TrialResources(concurrent, cpu, gpu, workers)


def lost_gpus_of_trials(
    recipe: Recipe | MutualRecipe, sweep: Sweep, resources: TrialResources, nodes: Sequence[Node]
) -> list[str]:
    """Return a warning for every role of a sweep that uses none of its nodes' GPUs. See `trial_resources` for the arguments."""
    if isinstance(recipe, MutualRecipe):  # no other process of the sweep uses GPUs
        return []
    number = max(1, resources.workers) * (sweep.search.concurrent or 1)
    each, keys = {"CPU": resources.cpus, "GPU": resources.gpus}, {"GPU": "training.gpus_per_worker"}
    trials = GpuRole(
        name="the trials",
        demand=ResourceRequest("the trials", number, each, None, "sweep.search.concurrent", keys),
        is_decided=recipe.training.gpus_per_worker is not None,
        needs_full_gpu=True,
        rule="a trial needs a node with 1 free GPU",
    )
    roles = [trials, *server_roles(recipe.teachers, reads_tables_itself=resources.in_own_process)]
    return [*lost_gpus(builder_roles(recipe.teachers, nodes), nodes), *lost_gpus(roles, nodes)]


def trial_recipe(recipe: Recipe | MutualRecipe, resources: TrialResources) -> Recipe | MutualRecipe:
    """Return the recipe that trials run: with their share of the cluster, without final evaluation and without loggers."""
    update = {"evaluation": recipe.evaluation.model_copy(update={"final_suites": []}), "loggers": LoggersSection()}
    if isinstance(recipe, MutualRecipe):
        return recipe.model_copy(update={**update, "ray": False})
    update["evaluation"] = recipe.evaluation.model_copy(update={"final_suites": [], "async_eval": None})
    share = {"cpus_per_worker": resources.cpus, "gpus_per_worker": resources.gpus}
    return recipe.model_copy(update={**update, "training": recipe.training.model_copy(update=share)})


def _without_servers(recipe: Recipe | MutualRecipe, nodes: Sequence[Resources]) -> list[Resources]:
    """Return the nodes' resources without those of the teachers' servers."""
    if isinstance(recipe, MutualRecipe):
        return list(nodes)
    left = list(nodes)
    for demand in server_demands(recipe.teachers):
        left = _without(left, demand.number, demand.each)
    return left


def _without(nodes: Sequence[Resources], number: int, each: Resources) -> list[Resources]:
    """Return what is left on nodes after placing `number` processes, each on the node with the most CPUs left."""
    left = [dict(node) for node in nodes]
    for _ in range(number):
        most = max(left, key=lambda node: node.get("CPU", 0.0), default={})
        most.update({kind: max(0.0, most.get(kind, 0.0) - amount) for kind, amount in each.items() if amount})
    return list(left)
