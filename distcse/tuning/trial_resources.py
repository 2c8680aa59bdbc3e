"""Decides how many trials run at once in the cluster, and the resources of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distcse.errors import ClusterTooSmallError
from distcse.experiments.registry import experiment_of
from distcse.experiments.trials import TrialRequest
from distcse.placement.gpu_shortfall import GpuRole, lost_gpus
from distcse.placement.resources import (
    Node,
    ResourceRequest,
    Resources,
    count_fitting,
    even_share,
    format_nodes,
    format_resources,
)
from distcse.recipe import BaseRecipe, Sweep
from distcse.teachers.gpus import embedding_roles, server_roles
from distcse.teachers.resources import server_demands

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
    leaves_threads: bool = False
    """Whether a stopped trial's threads may train on for a while."""

    @property
    def in_own_process(self) -> bool:
        """Whether a trial trains in its own process, without a Ray Train trainer."""
        return self.workers <= 1

    @property
    def can_reuse_process(self) -> bool:
        """Whether the process of a trial that ended can train the next one."""
        return self.in_own_process and not self.leaves_threads

    @property
    def reserved(self) -> dict[str, float]:
        """What a trial's process reserves: almost nothing if a trainer reserves for its workers."""
        return {"CPU": self.cpus, "GPU": self.gpus} if self.in_own_process else {"CPU": _TRAINER_CPUS}


def trial_resources(recipe: BaseRecipe, sweep: Sweep, nodes: Sequence[Resources]) -> TrialResources:
    """Return how many trials fit into the cluster's CPUs and GPUs, and an even share of the CPUs for each.

    `training.cpus_per_worker` and `gpus_per_worker` may be fractions: with 0.5, two trials share a core or GPU. A mutual
    distillation trains its groups one after the other in the trial's process. No worker spans two nodes.

    Args:
        recipe: The sweep's recipe.
        sweep: `search.concurrent` sets the number of trials; null is as many as fit.
        nodes: Resources of each node of the cluster.

    Raises:
        ClusterTooSmallError: `search.concurrent` trials do not fit.
    """
    request = experiment_of(recipe).trials.request
    left = _without_servers(request, nodes)
    workers, cpu, wants_gpu = request.workers, request.cpus_per_worker, request.gpus_per_worker
    each, trainer_cpus = max(1, workers), _TRAINER_CPUS if workers > 1 else 0.0
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
    return TrialResources(concurrent, cpu, gpu, workers, request.leaves_threads)


def lost_gpus_of_trials(
    recipe: BaseRecipe, sweep: Sweep, resources: TrialResources, nodes: Sequence[Node]
) -> list[str]:
    """Return a warning for every role of a sweep that uses none of its nodes' GPUs. See `trial_resources` for the arguments."""
    request = experiment_of(recipe).trials.request
    if request.teachers is None:  # no other process of the sweep uses GPUs
        return []
    number = max(1, resources.workers) * (sweep.search.concurrent or 1)
    each, keys = {"CPU": resources.cpus, "GPU": resources.gpus}, {"GPU": "training.gpus_per_worker"}
    trials = GpuRole(
        name="the trials",
        demand=ResourceRequest("the trials", number, each, None, "sweep.search.concurrent", keys),
        is_decided=request.gpus_per_worker is not None,
        needs_full_gpu=True,
        rule="a trial needs a node with 1 free GPU",
    )
    roles = [trials, *server_roles(request.teachers, reads_tables_itself=resources.in_own_process)]
    return [*lost_gpus(embedding_roles(request.teachers, nodes), nodes), *lost_gpus(roles, nodes)]


def _without_servers(request: TrialRequest, nodes: Sequence[Resources]) -> list[Resources]:
    """Return the nodes' resources without those of the teachers' servers."""
    left = list(nodes)
    for demand in server_demands(request.teachers) if request.teachers is not None else []:
        left = _without(left, demand.number, demand.each)
    return left


def _without(nodes: Sequence[Resources], number: int, each: Resources) -> list[Resources]:
    """Return what is left on nodes after placing `number` processes, each on the node with the most CPUs left."""
    left = [dict(node) for node in nodes]
    for _ in range(number):
        most = max(left, key=lambda node: node.get("CPU", 0.0), default={})
        most.update({kind: max(0.0, most.get(kind, 0.0) - amount) for kind, amount in each.items() if amount})
    return list(left)
