"""Joins the cluster of a student's run or embedding pass, after a check that it has what the work needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distcse.experiments.distillation.resources import RunResources, plan_run
from distcse.placement.cluster import Cluster
from distcse.recipe import Recipe
from distcse.recipe.names import is_path
from distcse.storage import is_uri, resolve_path
from distcse.teachers.kinds import kind_of


@contextmanager
def joined_for_run(
    recipe: Recipe, cluster: Cluster | None, run: Path, in_sweep: bool = False
) -> Iterator[RunResources | None]:
    """Context manager: join a run's cluster, and check its room for the workers and that its nodes see the run's folders.

    Args:
        recipe: The recipe to run.
        cluster: The cluster to join; None does nothing.
        run: An existing folder: the run's, or the parent of all runs.
        in_sweep: Whether a sweep runs the recipe, which decides the room of its trials itself. Default: False.

    Yields:
        What the run's processes reserve; None without a cluster or in a sweep.

    Raises:
        ClusterTooSmallError: The cluster does not have the resources. `resources.gpu` is `required`, and a role gets no
             GPU.
            No node has the labels of a key.
        SharedStorageError: A node does not see a folder.
        RayConnectionError: The cluster cannot be joined or started.
    """
    if cluster is None:
        yield None
        return
    with cluster.joined():
        resources = None if in_sweep else plan_run(recipe, cluster.nodes())
        written = {"storage.runs": run, "storage.cache": resolve_path(recipe.storage.cache)}
        labels = [recipe.training.node_labels, recipe.teachers.node_labels]
        cluster.require_shared(written, read_by_workers(recipe), labels)
        yield resources


@contextmanager
def joined_for_embedding(recipe: Recipe, cluster: Cluster | None) -> Iterator[None]:
    """Context manager: join the cluster of an embedding pass, and check that the teachers' nodes see the cache.

    Embedding needs no run folder and no training workers.

    Args:
        recipe: The recipe with the teachers.
        cluster: The cluster to join; None does nothing.

    Raises:
        SharedStorageError: A node does not see the cache or a teacher.
        RayConnectionError: The cluster cannot be joined or started.
    """
    if cluster is None:
        yield
        return
    with cluster.joined():
        written = {"storage.cache": resolve_path(recipe.storage.cache)}
        cluster.require_shared(written, _teacher_paths(recipe), [recipe.teachers.node_labels])
        yield


def read_by_workers(recipe: Recipe) -> dict[str, Path]:
    """Map recipe keys to the paths that actors read. Names of hub models are included, as paths that do not exist."""
    read = _teacher_paths(recipe)
    if recipe.evaluation.data is not None:
        read["evaluation.data"] = Path(recipe.evaluation.data)
    if is_path(recipe.evaluation.dev):
        read["evaluation.dev"] = Path(recipe.evaluation.dev)
    if (other_run := recipe.objective.projection_of) is not None and not is_uri(other_run):
        read["objective.regression.projection"] = Path(other_run)
    return {"student.backbone": Path(recipe.student.backbone), **read}


def _teacher_paths(recipe: Recipe) -> dict[str, Path]:
    return {
        f"teachers.encoders.{number}.backbone": Path(teacher.backbone)
        for number, teacher in enumerate(recipe.teachers.encoders)
        if kind_of(teacher, only_local=True).is_model
    }
