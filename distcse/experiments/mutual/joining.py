"""Joins the cluster of a mutual distillation, after a check that it has what the groups need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from distcse.experiments.mutual.resources import GroupResources, plan_groups
from distcse.placement.cluster import Cluster
from distcse.placement.gpu_plan import GpuPlan
from distcse.recipe import GroupSection, MutualRecipe
from distcse.recipe.names import is_path
from distcse.storage import resolve_path


@contextmanager
def joined_for_groups(
    recipe: MutualRecipe,
    groups: Sequence[GroupSection],
    cluster: Cluster | None,
    run: Path,
    in_sweep: bool = False,
) -> Iterator[GroupResources]:
    """Context manager: join the cluster, and check its room for all groups at once and that its nodes see the folders.

    Args:
        recipe: The recipe to run.
        groups: Its groups that are still running.
        cluster: The cluster to join; None does nothing.
        run: An existing folder: the run's, or the parent of all runs.
        in_sweep: Whether the recipe is run by a sweep, whose trials each run all groups in one process, on any node.
            Default: False.

    Yields:
        What the groups' workers reserve; without a cluster or in a sweep, an empty mapping per group.

    Raises:
        ClusterTooSmallError: The cluster does not have the resources. `resources.gpu` is `required`, and a group gets
            no GPU.
            No node has the labels of a group.
        SharedStorageError: A node does not see a folder.
        RayConnectionError: The cluster cannot be joined or started.
    """
    none = GroupResources([{} for _ in groups], GpuPlan([], []))
    if cluster is None:
        yield none
        return
    with cluster.joined():
        resources = none if in_sweep else plan_groups(recipe, groups, cluster.nodes())
        labels = [None] if in_sweep else [group.node_labels for group in groups]
        # A sweep's trial prepares its tokens in the process that trains on them.
        cache = {} if in_sweep else {"storage.cache": resolve_path(recipe.storage.cache)}
        cluster.require_shared({"storage.runs": run, **cache}, read_by_groups(recipe, groups), labels)
        yield resources


def read_by_groups(recipe: MutualRecipe, groups: Sequence[GroupSection]) -> dict[str, Path]:
    """Map recipe keys to the paths that actors read. Names of hub models are included, as paths that do not exist.

    Args:
        recipe: The recipe.
        groups: Its groups that are not dropped.
    """
    numbered = {recipe.groups.index(group): group for group in groups}
    backbones = {f"groups.{number}.backbone": Path(group.backbone) for number, group in numbered.items()}
    cross = {n: group.cross_backbone for n, group in numbered.items() if group.cross_backbone is not None}
    data = {"evaluation.data": Path(recipe.evaluation.data)} if recipe.evaluation.data is not None else {}
    dev = {"evaluation.dev": Path(recipe.evaluation.dev)} if is_path(recipe.evaluation.dev) else {}
    return {**backbones, **{f"groups.{n}.cross_backbone": Path(name) for n, name in cross.items()}, **data, **dev}
