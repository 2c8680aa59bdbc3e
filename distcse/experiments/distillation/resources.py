"""CPUs and GPUs of a student's run on a cluster: its training workers, its dev-score evaluator and its teachers' servers.

Ray Train's controller imports this module, so it imports neither PyTorch nor transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

from distcse.placement.resources import (
    Node,
    ResourceRequest,
    Resources,
    even_share,
    nodes_with,
    refuse_impossible,
)
from distcse.recipe import Recipe
from distcse.teachers.resources import server_demands

EVALUATOR_ALTERNATIVE = "evaluation.async_eval=null scores in the workers"
"""Fix of problems with the dev-score evaluator."""


def resources_per_worker(recipe: Recipe, nodes: Sequence[Node]) -> dict[str, float]:
    """Return the CPUs and GPUs of one training worker.

    Values that the recipe does not set are the worker's even share of the nodes.

    Args:
        recipe: The recipe.
        nodes: The nodes of its cluster.

    Raises:
        ClusterTooSmallError: The cluster does not have the resources.
        NodeLabelError: No node has the labels of a key.
    """
    training, teachers = recipe.training, recipe.teachers
    usable = nodes_with(nodes, training.node_labels, "training.node_labels")
    nodes_with(nodes, teachers.node_labels, "teachers.node_labels")
    others = [
        request
        for request in _other_requests(recipe)
        if (training.node_labels or {}).items() <= (request.labels or training.node_labels or {}).items()
    ]
    cpus, gpus = (_remaining(usable, kind, others) for kind in ("CPU", "GPU"))
    cpu = training.cpus_per_worker or max(1.0, float(int(even_share(cpus, training.workers))))
    has_enough = sum(int(free) for free in gpus) >= training.workers
    gpu = training.gpus_per_worker if training.gpus_per_worker is not None else float(has_enough)
    per_worker = {"CPU": cpu, "GPU": gpu} if gpu else {"CPU": cpu}
    refuse_impossible(requests_of_run(recipe, per_worker, min(training.worker_counts)), nodes)
    return per_worker


def requests_of_run(recipe: Recipe, per_worker: Resources, workers: int) -> list[ResourceRequest]:
    """List what must run at the same time: the given number of workers, the teachers' servers and the evaluator."""
    key = "training.workers" if recipe.training.min_workers is None else "training.min_workers"
    smaller = {kind: f"training.{kind.lower()}s_per_worker" for kind in per_worker}
    training = ResourceRequest(f"{key}={workers}", workers, per_worker, recipe.training.node_labels, key, smaller)
    return [training, *_other_requests(recipe)]


def evaluator_requests(recipe: Recipe) -> list[ResourceRequest]:
    """Return the resource request of the evaluator; empty if the workers compute the dev scores."""
    section = recipe.evaluation.async_eval
    if section is None:
        return []
    smaller = {"CPU": "evaluation.async_eval.cpus", "GPU": "evaluation.async_eval.gpus"}
    each = {"CPU": section.cpus, "GPU": section.gpus or 0.0}
    labels = recipe.training.node_labels
    return [
        ResourceRequest("evaluation.async_eval", 1, each, labels, "training.workers", smaller, EVALUATOR_ALTERNATIVE)
    ]


def describe_resources(recipe: Recipe, nodes: Sequence[Node]) -> str:
    """Describe the nodes of a run's cluster and the resources of its workers in one line."""
    per_worker = resources_per_worker(recipe, nodes)
    cpus, gpus = (sum(node.resources.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
    cluster = f"nodes {len(nodes)}, CPUs {cpus:g}, GPUs {gpus:g}"
    each = f"CPUs {per_worker['CPU']:g}, GPUs {per_worker.get('GPU', 0):g}"
    return f"{cluster}; workers {recipe.training.workers}, each with {each}"


def _other_requests(recipe: Recipe) -> list[ResourceRequest]:
    """List the teachers' servers that use resources, and the evaluator."""
    return [*server_demands(recipe.teachers), *evaluator_requests(recipe)]


def _remaining(nodes: Sequence[Resources], kind: str, requests: Sequence[ResourceRequest]) -> list[float]:
    """Return each node's free amount of a resource after the requests, each placed where most is free."""
    free = [node.get(kind, 0.0) for node in nodes]
    for request in requests:
        for _ in range(request.number):
            freest = max(range(len(free)), key=free.__getitem__)
            free[freest] -= request.each.get(kind, 0.0)
    return free
