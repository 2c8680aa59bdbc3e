"""Decides how many trials run at once in the cluster, and the resources of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distcse.devices.gpu_plan import GpuPlan, plan_gpus
from distcse.devices.resources import (
    Node,
    ResourceRequest,
    Resources,
    count_fitting,
    even_share,
    format_nodes,
    format_resources,
    nodes_with,
    refuse_impossible,
)
from distcse.errors import ClusterTooSmallError
from distcse.recipe import BaseRecipe, Sweep
from distcse.runs.experiment import TRIALS, TrialGpus, experiment_of
from distcse.teachers.resources import SERVERS, plan_embedding

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
    """Training workers of one trial; a single one trains in the trial's own process."""
    node_labels: Mapping[str, str] | None = None
    """Labels of the nodes of a trial's workers."""
    can_wait: bool = False
    """Whether trials may wait for nodes that an autoscaler starts."""
    leaves_threads: bool = False
    """Whether a stopped trial's threads may train on for a while."""
    server_gpus: float = 0.0
    """GPUs of one server that computes with a model or ranks, for all trials."""
    gpu_plans: Sequence[GpuPlan] = field(default=(), compare=False)
    """GPUs of the embedding pass, then those of the trials and their servers."""

    @property
    def in_own_process(self) -> bool:
        """Whether a trial trains in its own process, without a Ray Train trainer."""
        return self.workers == 1

    @property
    def can_reuse_process(self) -> bool:
        """Whether the process of a trial that ended can train the next one."""
        return self.in_own_process and not self.leaves_threads

    @property
    def trial_gpus(self) -> TrialGpus:
        """GPUs of the trials and their servers."""
        return TrialGpus(self.gpus, self.server_gpus)

    @property
    def reserved(self) -> dict[str, float]:
        """What a trial's process reserves, on a node with `node_labels`: almost nothing if a trainer reserves for its workers."""
        return {"CPU": self.cpus, "GPU": self.gpus} if self.in_own_process else {"CPU": _TRAINER_CPUS}


def least_requests(recipe: BaseRecipe) -> list[ResourceRequest]:
    """List what one trial and the teachers' servers need on any cluster, to wait for its nodes before planning on them."""
    requests = [process.least_request(recipe.gpu_mode) for process in experiment_of(recipe).trials.processes]
    return [request for request in requests if any(request.each.values())]


def trial_resources(recipe: BaseRecipe, sweep: Sweep, nodes: Sequence[Node]) -> TrialResources:
    """Return how many trials fit into the cluster's CPUs and GPUs, and an even share of the CPUs for each.

    `training.cpus_per_worker` and `gpus_per_worker` may be fractions: with 0.5, two trials share a core or GPU. A mutual
    distillation trains its groups one after the other in the trial's process. No worker spans two nodes. With
    `resources.wait_s`, more than `search.concurrent` need not fit yet: one trial is enough, and the others wait for nodes.

    Raises:
        ClusterTooSmallError: The cluster does not have the resources, a GPU that `resources.gpu` requires, or a node with
            the labels of a key.
    """
    trials = experiment_of(recipe).trials
    worker, *servers_of_all = trials.processes
    can_wait = recipe.resources.wait_s > 0
    number = 1 if can_wait else sweep.search.concurrent or 1  # of trials for which the nodes must have room
    plan = plan_gpus([replace(worker, number=worker.number * number), *servers_of_all], nodes, recipe.gpu_mode)
    gpu, servers = plan.of(TRIALS), plan.requests([1.0])[1:]
    refuse_impossible(servers, nodes)
    nodes_with(nodes, worker.labels, "training.node_labels")
    left = [node.resources for node in nodes]
    for demand in servers:
        left = _without(left, demand.number, demand.each)
    left = [free for node, free in zip(nodes, left, strict=True) if node.has(worker.labels)]
    each, cpu = worker.number, worker.cpus
    trainer_cpus = _TRAINER_CPUS if each > 1 else 0.0
    left = [node for node in left if count_fitting([node], {"GPU": gpu})]
    fits = count_fitting(left, {"CPU": (cpu or 1) + trainer_cpus / each, "GPU": gpu}) // each
    concurrent = sweep.search.concurrent or max(1, fits)
    at_once = min(concurrent, max(1, fits)) if can_wait else concurrent
    total_workers = each * concurrent
    left = _without(left, at_once, {"CPU": trainer_cpus})
    cpu = cpu or max(1.0, float(int(even_share([node.get("CPU", 0.0) for node in left], each * at_once))))
    one = {"CPU": cpu, "GPU": gpu}
    if count_fitting(left, one) < (each if can_wait else total_workers):
        raise ClusterTooSmallError(
            f"{concurrent} concurrent trials need {total_workers} training workers of {format_resources(one)} each, none of "
            f"them across nodes, but the resources that servers leave ({format_nodes(left)}) fit {count_fitting(left, one)}; "
            "lower search.concurrent, training.workers, training.cpus_per_worker or training.gpus_per_worker"
        )
    server_gpus = plan.of(SERVERS)
    if gpu and not (can_wait and sweep.search.concurrent):  # more trials may fit than had to
        plan = plan.with_number(TRIALS, total_workers)
    embedding = [] if trials.teachers is None else [plan_embedding(trials.teachers, nodes, recipe.gpu_mode)]
    return TrialResources(
        concurrent,
        cpu,
        gpu,
        each,
        worker.labels,
        can_wait,
        trials.leaves_threads,
        server_gpus,
        [*embedding, plan],
    )


def _without(nodes: Sequence[Resources], number: int, each: Resources) -> list[Resources]:
    """Return what is left on nodes after placing `number` processes: on the rest of a GPU, else where most CPUs are left."""
    left = [dict(node) for node in nodes]
    for _ in range(number):
        usable = [node for node in left if node.get("GPU", 0.0) >= each.get("GPU", 0.0)] or left
        chosen = max(
            usable,
            key=lambda node: (bool(each.get("GPU")) * node.get("GPU", 0.0) % 1, node.get("CPU", 0.0)),
            default={},
        )
        chosen.update({name: max(0.0, chosen.get(name, 0.0) - amount) for name, amount in each.items() if amount})
    return list(left)
