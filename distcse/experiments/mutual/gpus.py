"""The GPUs that the groups of a mutual distillation would get, for a warning before it starts."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.ray_backend.gpu_shortfall import GpuRole, lost_gpus
from distcse.ray_backend.nodes import Node, ResourceRequest, Resources
from distcse.recipe import GroupSection, MutualRecipe


def lost_gpus_of_groups(
    recipe: MutualRecipe, groups: Sequence[GroupSection], wants: Sequence[Resources], nodes: Sequence[Node]
) -> list[str]:
    """A warning where groups get none of the GPUs of their nodes.

    Args:
        recipe: What will be run.
        groups: Those of its groups that still run.
        wants: CPUs and GPUs of a worker of each.
        nodes: The nodes of the cluster.
    """
    undecided = sum(group.workers for group in groups if group.gpus_per_worker is None)
    rule = f"their {undecided} workers need {undecided} GPUs" if undecided > 1 else "its worker needs 1 GPU"
    if any(group.workers > 1 for group in groups):
        rule += ", and groups share GPUs only where every group has one worker"
    return lost_gpus([_role(recipe, group, want, rule) for group, want in zip(groups, wants, strict=True)], nodes)


def _role(recipe: MutualRecipe, group: GroupSection, want: Resources, rule: str) -> GpuRole:
    number = recipe.groups.index(group)
    key = f"groups.{number}.workers"
    batches = (recipe.bi.batch_size, recipe.cross.batch_size)
    return GpuRole(
        name="the groups",
        demand=ResourceRequest(
            f"{key}={group.workers}",
            group.workers,
            want,
            group.node_labels,
            key,
            {"GPU": f"groups.{number}.gpus_per_worker"},
        ),
        is_decided=group.gpus_per_worker is not None,
        takes_whole=True,
        rule=rule,
        counts=[count for count in range(1, group.workers) if not any(size % count for size in batches)],
    )
