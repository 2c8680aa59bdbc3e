"""CPUs and GPUs of the workers of a mutual distillation's groups on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distcse.placement.gpu_plan import GpuPlan, plan_gpus
from distcse.placement.gpu_shares import GpuRole
from distcse.placement.resources import Node, ResourceRequest, Resources, even_share, nodes_with, refuse_impossible
from distcse.recipe import GroupSection, MutualRecipe

_SMALLER = {"CPU": "groups.N.cpus_per_worker", "GPU": "groups.N.gpus_per_worker"}
_ALTERNATIVE = "write ray: false to run them one after the other"


@dataclass(frozen=True)
class GroupResources:
    """What the workers of groups that run at the same time reserve."""

    per_worker: Sequence[Resources]
    """CPUs and GPUs of one worker of each group."""
    gpus: GpuPlan
    """The GPUs of all groups, for messages."""


def plan_groups(recipe: MutualRecipe, groups: Sequence[GroupSection], nodes: Sequence[Node]) -> GroupResources:
    """Decide the CPUs and GPUs of one worker of each group.

    CPUs that a group does not set are its even share of the nodes. GPUs that it does not set are shared out by `share_gpus`.

    Args:
        recipe: The recipe.
        groups: Its groups that run at the same time.
        nodes: The nodes of the cluster.

    Raises:
        ClusterTooSmallError: The cluster does not have the resources for all groups at once.
        GpuRequiredError: `resources.gpu` is `required`, and a group gets no GPU.
        NodeLabelError: No node has the labels of a group.
    """
    numbers = [recipe.groups.index(group) for group in groups]
    usable = [
        nodes_with(nodes, group.node_labels, f"groups.{number}.node_labels")
        for number, group in zip(numbers, groups, strict=True)
    ]
    roles = [_gpu_role(recipe, number) for number in numbers]
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
    plan.require_room()
    return GroupResources(per_worker, plan)


def _gpu_role(recipe: MutualRecipe, number: int) -> GpuRole:
    group = recipe.groups[number]
    batches = (recipe.bi.batch_size, recipe.cross.batch_size)
    loops = (("bi", recipe.bi), ("cross", recipe.cross))
    can_use_torch = all(not section.zero_stage and section.deepspeed is None for _, section in loops)
    to_torch = tuple((f"{key}.engine", "torch") for key, section in loops if section.engine != "torch")
    return GpuRole(
        f"group {group.name}",
        group.workers,
        group.node_labels,
        group.gpus_per_worker,
        f"groups.{number}.workers",
        f"groups.{number}.gpus_per_worker",
        needs_own_gpu=group.workers > 1,
        counts=[count for count in range(1, group.workers) if not any(size % count for size in batches)],
        sharing_changes=to_torch if can_use_torch else None,
    )


def _competing_workers(group: GroupSection, groups: Sequence[GroupSection]) -> int:
    """Count the workers of all groups that may run on a group's nodes, including its own."""
    labels = (group.node_labels or {}).items()
    return sum(
        other.workers
        for other in groups
        if all((other.node_labels or {}).get(name, value) == value for name, value in labels)
    )
