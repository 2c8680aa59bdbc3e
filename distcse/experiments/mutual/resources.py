"""CPUs and GPUs of the workers of a mutual distillation's groups on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distcse.events import Reporter
from distcse.experiments.mutual.scheduling import worker_counts
from distcse.placement.cluster import Cluster
from distcse.placement.gpu_plan import GpuPlan, GpuRole, plan_gpus, report_plans
from distcse.placement.resources import (
    Node,
    ResourceRequest,
    Resources,
    count_fitting,
    even_share,
    nodes_with,
    refuse_impossible,
)
from distcse.recipe import GroupSection, MutualRecipe
from distcse.recipe.training import least_gpus

_SMALLER = {"CPU": "groups.N.cpus_per_worker", "GPU": "groups.N.gpus_per_worker"}
_ALTERNATIVE = "write mutual.shared_workers: auto, with which groups take turns, or ray: false"


@dataclass(frozen=True)
class GroupResources:
    """What the workers of groups that run at the same time reserve."""

    per_worker: Sequence[Resources]
    """CPUs and GPUs of one worker of each group."""
    gpus: GpuPlan
    """The GPUs of all groups, for messages."""
    shared_workers: int | None = None
    """Number of workers that all groups share; None if each has its own."""

    @property
    def gpus_of_groups(self) -> Sequence[float]:
        """GPUs of one worker of each group."""
        return [each.get("GPU", 0.0) for each in self.per_worker]


def least_requests(recipe: MutualRecipe, groups: Sequence[GroupSection]) -> list[ResourceRequest]:
    """List what groups that run at the same time need on any cluster, to wait for its nodes before planning on them.

    Args:
        recipe: The recipe.
        groups: Its groups that are not dropped. Groups that share workers need those of one group, or the number that is set.
    """
    shared = recipe.mutual.shared_workers
    requests = []
    for group in groups if shared is None else groups[:1]:
        number = group.workers if shared is None else shared if isinstance(shared, int) else 1
        gpus = least_gpus(recipe.gpu_mode, group.gpus_per_worker)
        each = {"CPU": group.cpus_per_worker or 1.0, **({"GPU": gpus} if gpus else {})}
        key = "groups.N.workers" if shared is None else "mutual.shared_workers"
        description = f"{key.replace('N', str(recipe.groups.index(group)))}={number}"
        requests.append(ResourceRequest(description, number, each, group.node_labels, key, _SMALLER, _ALTERNATIVE))
    return requests


def plan_groups(recipe: MutualRecipe, groups: Sequence[GroupSection], nodes: Sequence[Node]) -> GroupResources:
    """Decide the CPUs and GPUs of one worker of each group, and how many workers they share.

    CPUs that a group does not set are its even share of the nodes. GPUs that it does not set are one for a worker.

    Args:
        recipe: The recipe.
        groups: Its groups that run at the same time.
        nodes: The nodes of the cluster.

    Raises:
        ClusterTooSmallError: The cluster does not have the resources for all groups at once, or for one that shares
            workers. `resources.gpu` is `required`, and a group gets no GPU.
            No node has the labels of a group.
    """
    if recipe.mutual.shared_workers is not None:
        return _plan_shared(recipe, groups, nodes)
    numbers = [recipe.groups.index(group) for group in groups]
    usable = [
        nodes_with(nodes, group.node_labels, f"groups.{number}.node_labels")
        for number, group in zip(numbers, groups, strict=True)
    ]
    roles = [GpuRole(f"group {g.name}", g.workers, g.node_labels, g.gpus_per_worker) for g in groups]
    plan = plan_gpus(roles, nodes, recipe.gpu_mode)
    per_worker: list[Resources] = []
    requests: list[ResourceRequest] = []
    for number, group, found, gpus in zip(numbers, groups, usable, plan.gpus, strict=True):
        cpus = [node.get("CPU", 0.0) for node in found if not gpus or node.get("GPU")]
        even = even_share(cpus, _competing_workers(group, groups))
        each = {"CPU": group.cpus_per_worker or even, **({"GPU": gpus} if gpus else {})}
        per_worker.append(each)
        description = f"groups.{number}.workers={group.workers}"
        requests.append(
            ResourceRequest(
                description, group.workers, each, group.node_labels, "groups.N.workers", _SMALLER, _ALTERNATIVE
            )
        )
    refuse_impossible(requests, nodes)
    return GroupResources(per_worker, plan)


def _plan_shared(recipe: MutualRecipe, groups: Sequence[GroupSection], nodes: Sequence[Node]) -> GroupResources:
    """Decide the number of shared workers and their resources: a GPU each, or without GPUs an even share of the CPUs."""
    first, key, number = groups[0], "mutual.shared_workers", recipe.mutual.shared_workers
    found = nodes_with(nodes, first.node_labels, f"groups.{recipe.groups.index(first)}.node_labels")
    most = number if isinstance(number, int) else _count_shared(recipe, groups, found)
    plan = plan_gpus(
        [GpuRole("shared workers", most, first.node_labels, first.gpus_per_worker)], nodes, recipe.gpu_mode
    )
    (gpus,) = plan.gpus
    cpus = [node.get("CPU", 0.0) for node in found if not gpus or node.get("GPU")]
    each = {"CPU": first.cpus_per_worker or even_share(cpus, most), **({"GPU": gpus} if gpus else {})}
    request = ResourceRequest(f"{key}={most}", most, each, first.node_labels, key, _SMALLER, _ALTERNATIVE)
    refuse_impossible([request], nodes)
    for group in groups:
        worker_counts(group.rng_streams, most, group.workers)
    return GroupResources([each] * len(groups), plan, most)


def _count_shared(recipe: MutualRecipe, groups: Sequence[GroupSection], nodes: Sequence[Resources]) -> int:
    """Count the workers that fit on the nodes: by GPUs, by `cpus_per_worker`, or one worker per CPU as far as groups need it."""
    first = groups[0]
    gpus = 0.0 if recipe.gpu_mode == "none" else 1.0 if first.gpus_per_worker is None else first.gpus_per_worker
    each = {"CPU": first.cpus_per_worker or 1.0, **({"GPU": gpus} if gpus and any(n.get("GPU") for n in nodes) else {})}
    fitting = count_fitting(nodes, each)
    if "GPU" not in each and first.cpus_per_worker is None:
        fitting = min(fitting, sum(group.workers for group in groups))
    return max(1, fitting)


def _competing_workers(group: GroupSection, groups: Sequence[GroupSection]) -> int:
    """Count the workers of all groups that may run on a group's nodes, including its own."""
    labels = (group.node_labels or {}).items()
    return sum(
        other.workers
        for other in groups
        if all((other.node_labels or {}).get(name, value) == value for name, value in labels)
    )


def report_gpus(
    recipe: MutualRecipe, groups: Sequence[GroupSection], cluster: Cluster | None, reporter: Reporter
) -> None:
    """Report the GPUs of the groups, waiting for the cluster unless it is this machine without a GPU.

    Args:
        recipe: The recipe to run.
        groups: Its groups that are still running.
        cluster: The cluster; None reports nothing.
        reporter: Receives one line.

    Raises:
        ClusterTooSmallError: The cluster does not have the resources for all groups at once. `resources.gpu` is
            `required`, and a group gets no GPU.
            No node has the labels of a group.
        RayConnectionError: The cluster cannot be joined or started.
    """
    if cluster is None or (recipe.gpu_mode != "required" and cluster.is_one_cpu()):
        return
    report_plans([plan_groups(recipe, groups, cluster.nodes()).gpus], reporter.emit)
