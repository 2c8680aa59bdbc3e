"""The GPUs of a mutual distillation's groups: which group gets how much, before anything is spent."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.events import Reporter
from distcse.experiments.mutual.resources import plan_groups
from distcse.placement.cluster import Cluster
from distcse.placement.gpu_plan import report_plans
from distcse.recipe import GroupSection, MutualRecipe


def report_gpus(
    recipe: MutualRecipe, groups: Sequence[GroupSection], cluster: Cluster | None, reporter: Reporter
) -> None:
    """Report the GPUs of the groups, waiting for the cluster unless it is this machine without a GPU.

    Args:
        recipe: The recipe to run.
        groups: Its groups that are still running.
        cluster: The cluster; None reports nothing.
        reporter: Receives one line, and a warning for each group that gets none of its nodes' GPUs.

    Raises:
        ClusterTooSmallError: The cluster does not have the resources for all groups at once.
        GpuRequiredError: `resources.gpu` is `required`, and a group gets no GPU.
        NodeLabelError: No node has the labels of a group.
        RayConnectionError: The cluster cannot be joined or started.
    """
    if cluster is None or (recipe.gpu_mode != "required" and cluster.is_one_cpu()):
        return
    report_plans([plan_groups(recipe, groups, cluster.nodes()).gpus], reporter.emit)
