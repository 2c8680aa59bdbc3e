"""CPUs and GPUs of a student's run on a cluster: its training workers, its dev-score evaluator and its teachers' servers.

Ray Train's controller imports this module, so it imports neither PyTorch nor transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distcse.events import LogMessage, Reporter
from distcse.placement.cluster import Cluster, Labels
from distcse.placement.gpu_plan import GpuPlan, GpuRole, plan_gpus, report_plans
from distcse.placement.resources import (
    Node,
    ResourceRequest,
    Resources,
    count_fitting,
    even_share,
    find_shortfall,
    nodes_with,
    refuse_impossible,
)
from distcse.recipe import Recipe, TeacherSection
from distcse.recipe.training import least_gpus
from distcse.teachers.resources import (
    SERVERS,
    least_embedding,
    plan_embedding,
    server_demands,
    server_roles,
    starts_servers,
)

EVALUATOR_ALTERNATIVE = "evaluation.async_eval=null scores in the workers"
"""Fix of problems with the dev-score evaluator."""
WORKERS, EVALUATOR = "training workers", "dev-score evaluator"
"""Names of the GPU roles of a run, besides its teachers' servers."""


@dataclass(frozen=True)
class RunResources:
    """What the processes of a run's training reserve, decided once for the run."""

    per_worker: Resources
    """CPUs and GPUs of one training worker."""
    server_gpus: float
    """GPUs of one server that computes with a model or ranks."""
    evaluator: ResourceRequest | None
    """The dev-score evaluator; None if the workers compute the dev scores."""
    gpus: GpuPlan
    """The GPUs of all roles, for messages."""
    warning: str = ""
    """A warning that servers or evaluator may wait forever for resources of nodes that the workers fill."""

    def requests(self, recipe: Recipe, workers: int) -> list[ResourceRequest]:
        """List what must run at the same time: the given number of workers, the teachers' servers and the evaluator."""
        key = "training.workers" if recipe.training.min_workers is None else "training.min_workers"
        smaller = {kind: f"training.{kind.lower()}s_per_worker" for kind in self.per_worker}
        labels = recipe.training.node_labels
        training = ResourceRequest(f"{key}={workers}", workers, self.per_worker, labels, key, smaller)
        return [training, *_other_requests(recipe, self.server_gpus, self.evaluator)]


def least_requests(recipe: Recipe) -> list[ResourceRequest]:
    """List what a run needs on any cluster, to wait for its nodes before anything is planned on them.

    A process takes the CPUs and GPUs that the recipe sets, or one CPU and, if GPUs are required, one GPU.
    """
    training, teachers, mode = recipe.training, recipe.teachers, recipe.gpu_mode
    gpus, server_gpus = (least_gpus(mode, section) for section in (training.gpus_per_worker, teachers.gpus_per_actor))
    section = recipe.evaluation.async_eval
    evaluator = evaluator_request(recipe, 0.0 if section is None else least_gpus(mode, section.gpus))
    per_worker = {"CPU": training.cpus_per_worker or 1.0, **({"GPU": gpus} if gpus else {})}
    requests = RunResources(per_worker, server_gpus, evaluator, GpuPlan([], [])).requests(recipe, training.workers)
    if teachers.node_labels and teachers.node_labels != training.node_labels:
        requests.append(least_embedding(teachers, mode))
    return requests


def plan_run(recipe: Recipe, nodes: Sequence[Node]) -> RunResources:
    """Decide the CPUs and GPUs of everything that runs during training.

    Values that the recipe does not set are an even share of the CPUs, a GPU for a worker and a quarter for a helper.

    Args:
        recipe: The recipe.
        nodes: The nodes of its cluster.

    Raises:
        ClusterTooSmallError: The cluster does not have the resources. `resources.gpu` is `required`, and a role gets no
             GPU.
            No node has the labels of a key.
    """
    training, teachers = recipe.training, recipe.teachers
    usable = nodes_with(nodes, training.node_labels, "training.node_labels")
    if starts_servers(teachers):
        nodes_with(nodes, teachers.node_labels, "teachers.node_labels")
    plan = plan_gpus(_gpu_roles(recipe), nodes, recipe.gpu_mode)
    gpu, evaluator = plan.of(WORKERS), evaluator_request(recipe, plan.of(EVALUATOR))
    cpus = _remaining_cpus(nodes, training.node_labels, _other_requests(recipe, plan.of(SERVERS), evaluator))
    most = [count_fitting([node], {"GPU": gpu}) for node in usable]
    cpu = training.cpus_per_worker or max(1.0, float(int(even_share(cpus, min(training.workers, sum(most)), most))))
    gpus = {"GPU": gpu} if gpu else {}
    resources = RunResources({"CPU": cpu, **gpus}, plan.of(SERVERS), evaluator, plan)
    stranded = _find_stranded(recipe, resources, nodes)
    while stranded is not None and training.cpus_per_worker is None and cpu > 1:
        cpu -= 1.0
        resources = replace(resources, per_worker={"CPU": cpu, **gpus})
        stranded = _find_stranded(recipe, resources, nodes)
    refuse_impossible(resources.requests(recipe, min(training.worker_counts)), nodes)
    return resources if stranded is None else replace(resources, warning=_describe_stranded(stranded))


def evaluator_request(recipe: Recipe, gpus: float) -> ResourceRequest | None:
    """Return the resource request of the evaluator; None if the workers compute the dev scores."""
    section = recipe.evaluation.async_eval
    if section is None:
        return None
    smaller = {"CPU": "evaluation.async_eval.cpus", "GPU": "evaluation.async_eval.gpus"}
    each = {"CPU": section.cpus, "GPU": gpus}
    labels = recipe.training.node_labels
    return ResourceRequest("evaluation.async_eval", 1, each, labels, "training.workers", smaller, EVALUATOR_ALTERNATIVE)


def describe_resources(recipe: Recipe, resources: RunResources | None, nodes: Sequence[Node]) -> str:
    """Describe the nodes of a run's cluster and the resources of its workers, unless they are a sweep's, in one line."""
    cpus, gpus = (sum(node.resources.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
    cluster = f"nodes {len(nodes)}, CPUs {cpus:g}, GPUs {gpus:g}"
    if resources is None:
        return cluster
    per_worker = resources.per_worker
    each = f"CPUs {per_worker['CPU']:g}, GPUs {per_worker.get('GPU', 0):g}"
    return f"{cluster}; workers {recipe.training.workers}, each with {each}"


def _gpu_roles(recipe: Recipe) -> list[GpuRole]:
    """List the roles that can use GPUs during training, the most important first."""
    training, section = recipe.training, recipe.evaluation.async_eval
    workers = GpuRole(
        WORKERS,
        training.workers,
        training.node_labels,
        training.gpus_per_worker,
        is_elastic=training.min_workers is not None,
    )
    roles = [workers, *server_roles(recipe.teachers)]
    if section is not None:
        roles.append(GpuRole(EVALUATOR, 1, training.node_labels, section.gpus, is_helper=True))
    return roles


def _other_requests(recipe: Recipe, server_gpus: float, evaluator: ResourceRequest | None) -> list[ResourceRequest]:
    """List the teachers' servers that use resources, and the evaluator."""
    return [*server_demands(recipe.teachers, server_gpus), *([evaluator] if evaluator is not None else [])]


def _remaining_cpus(nodes: Sequence[Node], labels: Labels, requests: Sequence[ResourceRequest]) -> list[float]:
    """Return the CPUs of each node with the labels after the requests, each placed where most are free.

    Requests without labels count on these nodes: servers start where their workers run.
    """
    free = [node.resources.get("CPU", 0.0) for node in nodes]
    for request in requests:
        usable = [index for index, node in enumerate(nodes) if node.has(request.labels or labels)]
        for _ in range(request.number):
            free[max(usable, key=free.__getitem__)] -= request.each.get("CPU", 0.0)
    return [cpus for node, cpus in zip(nodes, free, strict=True) if node.has(labels)]


def _find_stranded(recipe: Recipe, resources: RunResources, nodes: Sequence[Node]) -> str | None:
    """Describe processes that may never start, because workers without their labels may fill the nodes that they need."""
    requests = resources.requests(recipe, recipe.training.workers)
    if all(request.labels == requests[0].labels for request in requests):
        return None
    return find_shortfall(requests, nodes, in_start_order=True)


def _describe_stranded(shortfall: str) -> str:
    return (
        f"{shortfall} may wait forever: processes that start before may fill the nodes that it needs; lower "
        "training.cpus_per_worker, or keep the workers off them with training.node_labels"
    )


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
        ClusterTooSmallError: Their embedding actors get no GPU.
    """
    if embedded and cluster is not None and recipe.gpu_mode == "required":
        plan_embedding(recipe.teachers, cluster.nodes(), recipe.gpu_mode, embedded).require_all()


def report_gpus(recipe: Recipe, cluster: Cluster | None, reporter: Reporter) -> None:
    """Report the GPUs of a run on a cluster, waiting for the cluster unless it is this machine without a GPU.

    Args:
        recipe: The recipe to run.
        cluster: Its cluster; None reports nothing.
        reporter: Receives one line.

    Raises:
        ClusterTooSmallError: The cluster does not have the resources. `resources.gpu` is `required`, and a role gets no
             GPU.
            No node has the labels of a key.
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
