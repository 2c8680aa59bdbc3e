"""The GPUs of a student's run: which process gets how much, before anything is spent."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.events import LogMessage, Reporter
from distcse.experiments.distillation.resources import RunResources, plan_run
from distcse.placement.cluster import Cluster
from distcse.placement.gpu_plan import GpuPlan, report_plans
from distcse.placement.resources import Node
from distcse.recipe import Recipe, TeacherSection
from distcse.teachers.resources import plan_embedding


def plans_of_run(recipe: Recipe, resources: RunResources, nodes: Sequence[Node]) -> list[GpuPlan]:
    """Return the plans of a run's GPUs: those of the embedding pass, then those of the training."""
    return [plan_embedding(recipe.teachers, nodes, recipe.gpu_mode), resources.gpus]


def report_embedding_gpus(recipe: Recipe, cluster: Cluster | None, reporter: Reporter) -> None:
    """Report the GPUs of an embedding pass without a run; see `report_gpus`."""
    if cluster is not None and not _needs_no_report(recipe, cluster):
        report_plans([plan_embedding(recipe.teachers, cluster.nodes(), recipe.gpu_mode)], reporter.emit)


def require_gpus_of(recipe: Recipe, embedded: Sequence[TeacherSection], cluster: Cluster | None) -> None:
    """Check that the actors of the teachers that embed get a GPU, if `resources.gpu` is `required`.

    Args:
        recipe: The recipe with the teachers.
        embedded: The teachers whose tables are incomplete.
        cluster: The teachers' cluster; None checks nothing.

    Raises:
        GpuRequiredError: Their embedding actors get no GPU.
    """
    if embedded and cluster is not None and recipe.gpu_mode == "required":
        plan_embedding(recipe.teachers, cluster.nodes(), recipe.gpu_mode, embedded).require_all()


def report_gpus(recipe: Recipe, cluster: Cluster | None, reporter: Reporter) -> None:
    """Report the GPUs of a run on a cluster, waiting for the cluster unless it is this machine without a GPU.

    Args:
        recipe: The recipe to run.
        cluster: Its cluster; None reports nothing.
        reporter: Receives one line, and a warning for each kind of process that gets none of its nodes' GPUs.

    Raises:
        ClusterTooSmallError: The cluster does not have the resources.
        GpuRequiredError: `resources.gpu` is `required`, and a role gets no GPU.
        NodeLabelError: No node has the labels of a key.
        RayConnectionError: The cluster cannot be joined or started.
    """
    if cluster is None or _needs_no_report(recipe, cluster):
        return
    nodes = cluster.nodes()
    resources = plan_run(recipe, nodes)
    report_plans(plans_of_run(recipe, resources, nodes), reporter.emit)
    if resources.warning:
        reporter.emit(LogMessage(resources.warning, warning=True))


def _needs_no_report(recipe: Recipe, cluster: Cluster) -> bool:
    """Whether the cluster is this machine without a GPU, for which a run need not wait."""
    return recipe.gpu_mode != "required" and cluster.is_one_cpu()
