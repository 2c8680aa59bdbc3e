"""Warnings, before a mutual distillation starts, of GPUs that none of its groups would use."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.placement.gpu_shortfall import GpuRole, lost_gpus
from distcse.placement.resources import Node, ResourceRequest, Resources
from distcse.recipe import GroupSection, MutualRecipe


def lost_gpus_of_groups(
    recipe: MutualRecipe, groups: Sequence[GroupSection], per_worker: Sequence[Resources], nodes: Sequence[Node]
) -> list[str]:
    """Return warnings for groups that get none of their nodes' GPUs.

    Args:
        recipe: The recipe to run.
        groups: Its groups that are still running.
        per_worker: CPUs and GPUs of one worker of each group.
        nodes: The nodes of the cluster.
    """
    undecided = sum(group.workers for group in groups if group.gpus_per_worker is None)
    rule = f"their {undecided} workers need {undecided} GPUs" if undecided > 1 else "its worker needs 1 GPU"
    if any(group.workers > 1 for group in groups):
        rule += ", and groups share GPUs only where every group has one worker"
    roles = [_role(recipe, group, each, rule) for group, each in zip(groups, per_worker, strict=True)]
    return lost_gpus(roles, nodes)


def _role(recipe: MutualRecipe, group: GroupSection, each: Resources, rule: str) -> GpuRole:
    number = recipe.groups.index(group)
    key = f"groups.{number}.workers"
    batches = (recipe.bi.batch_size, recipe.cross.batch_size)
    return GpuRole(
        name="the groups",
        demand=ResourceRequest(
            f"{key}={group.workers}",
            group.workers,
            each,
            group.node_labels,
            key,
            {"GPU": f"groups.{number}.gpus_per_worker"},
        ),
        is_decided=group.gpus_per_worker is not None,
        needs_full_gpu=True,
        rule=rule,
        counts=[count for count in range(1, group.workers) if not any(size % count for size in batches)],
    )
