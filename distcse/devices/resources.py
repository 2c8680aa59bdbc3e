"""Resources of a cluster's nodes, and whether they suffice for everything that a run needs at the same time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distcse.errors import ClusterTooSmallError

Resources = Mapping[str, float]
"""Amounts by Ray's resource names: {"CPU": 4, "GPU": 1}."""

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Node:
    """One node of the cluster."""

    id: str
    resources: Resources
    labels: Mapping[str, str]
    address: str = ""
    """Address of the node; empty for a made-up one."""

    def has(self, labels: Mapping[str, str] | None) -> bool:
        """Return whether the node has all of these labels; None matches any node."""
        return (labels or {}).items() <= self.labels.items()


@dataclass(frozen=True)
class ResourceRequest:
    """Identical actors that must run at the same time."""

    description: str
    """Description with recipe key and value, such as training.workers=2."""
    number: int
    """Number of actors."""
    each: Resources
    """Resources of one actor, all on one node."""
    labels: Mapping[str, str] | None
    """Required labels of the actors' nodes; None is any node."""
    number_key: str
    """Recipe key of `number`."""
    resource_keys: Mapping[str, str]
    """Recipe keys of one actor's resources, by resource name."""
    alternative: str = ""
    """Another fix, such as `use teachers.mode=table`."""

    def keys_to_lower(self, kinds: Iterable[str]) -> str:
        """Format the recipe keys to lower if resources of these kinds do not suffice, and the alternative."""
        keys = [self.number_key, *(self.resource_keys[kind] for kind in kinds if kind in self.resource_keys)]
        return " or ".join(keys) + (f", or {self.alternative}" if self.alternative else "")


def nodes_with(nodes: Sequence[Node], labels: Mapping[str, str] | None, key: str) -> list[Resources]:
    """Return the resources of each node with these labels."""
    chosen = [node.resources for node in nodes if node.has(labels)]
    if labels and not chosen:
        raise no_node_error({key: labels})
    return chosen


def no_node_error(labels: Mapping[str, Mapping[str, str] | None]) -> ClusterTooSmallError:
    """Return the error that no node has the labels of any recipe key."""
    required = {key: _format_labels(each or {}) for key, each in labels.items()}
    described = " or ".join(f"{each} of {key}" for key, each in required.items())
    first = next(iter(required.values()))
    return ClusterTooSmallError(
        f'no node has the labels {described}; start nodes with ray start --labels "{first}", or write null'
    )


def refuse_impossible(requests: Sequence[ResourceRequest], nodes: Sequence[Node]) -> None:
    """Refuse requests that the nodes can never run at the same time.

    It checks the total of all requests, and that the actors of each request fit, as no actor can span two nodes. How
    different requests share nodes is up to Ray.
    """
    for labels in (None, *(request.labels for request in requests if request.labels)):
        available = [node.resources for node in nodes if node.has(labels)]
        labelled = [r for r in requests if (labels or {}).items() <= (r.labels or {}).items()]
        _refuse_total(labelled, available, describe_nodes(labels))
    for request in requests:
        available = [node.resources for node in nodes if node.has(request.labels)]
        if (count := count_fitting(available, request.each)) < request.number:
            raise ClusterTooSmallError(
                f"{request.description} needs {request.number} x {format_resources(request.each)}, each on one node, but "
                f"{describe_nodes(request.labels)} {format_nodes(available)}, which fit {count}; "
                f"lower {request.keys_to_lower(request.each)}"
            )


def find_shortfall(requests: Sequence[ResourceRequest], nodes: Sequence[Node]) -> str | None:
    """Describe actors that the nodes cannot run at the same time; return None if they can run all.

    A greedy placement: the actors with the fewest options first, each on the node where the others need the resources
    least. In rare cases it finds a shortfall although a placement exists.
    """
    free = [(node, dict(node.resources)) for node in nodes]

    def cost_to_others(request: ResourceRequest, index: int) -> tuple[int, float, float]:
        """Rank a node: other requests that need its labels, free GPUs that this request does not use, free CPUs."""
        node, resources = free[index]
        competing = sum(bool(other.labels) and node.has(other.labels) for other in requests if other is not request)
        unused_gpus = 0.0 if request.each.get("GPU") else resources.get("GPU", 0.0)
        return competing, unused_gpus, resources.get("CPU", 0.0)

    for request in sorted(requests, key=lambda r: (not r.labels, -r.each.get("GPU", 0.0), -r.each.get("CPU", 0.0))):
        for num_placed in range(request.number):
            fits = [
                (cost_to_others(request, index), index)
                for index, (node, resources) in enumerate(free)
                if node.has(request.labels) and count_fitting([resources], request.each)
            ]
            if not fits:
                where = f" on a node with {_format_labels(request.labels)}" if request.labels else ""
                each = format_resources(request.each)
                return f"{request.number - num_placed} of {request.description} ({each} each){where}"
            _, resources = free[min(fits)[1]]
            for kind, amount in request.each.items():
                resources[kind] = resources.get(kind, 0.0) - amount
    return None


def count_fitting(nodes: Sequence[Resources], each: Resources) -> int:
    """Return how many identical actors fit on nodes."""
    required = {kind: amount for kind, amount in each.items() if amount}
    if not required:
        return sys.maxsize if nodes else 0
    return sum(min(_count_on_node(kind, node, need) for kind, need in required.items()) for node in nodes)


def _count_on_node(kind: str, node: Resources, need: float) -> int:
    """Return how many actors that need an amount of a resource fit on a node. A fraction of a GPU is on one GPU."""
    available = node.get(kind, 0.0)
    if kind == "GPU" and need < 1:
        return int(available) * int(1 / need + _ROUNDING) + int(available % 1 / need + _ROUNDING)
    return int(available / need + _ROUNDING)


def even_share(nodes: Sequence[float], workers: int, most: Sequence[int] | None = None) -> float:
    """Return the largest number of CPUs per worker, rounded down to 0.1, with which all workers fit."""
    limits = [workers] * len(nodes) if most is None else most
    shares = {int(10 * cpus / number) / 10 for cpus in nodes for number in range(1, workers + 1)}

    def count(share: float) -> int:
        return sum(min(limit, int(cpus / share + _ROUNDING)) for cpus, limit in zip(nodes, limits, strict=True))

    return max((share for share in shares if share and count(share) >= workers), default=0.1)


def format_resources(amounts: Resources) -> str:
    """Format resources, such as `4 CPUs and 0.5 GPUs`."""
    parts = [
        f"{amounts[kind]:g} {kind}{'' if amounts[kind] == 1 else 's'}" for kind in ("CPU", "GPU") if amounts.get(kind)
    ]
    return " and ".join(parts) or "no CPU"


def _refuse_total(requests: Sequence[ResourceRequest], nodes: Sequence[Resources], nodes_have: str) -> None:
    for kind in ("GPU", "CPU"):
        available = sum(node.get(kind, 0.0) for node in nodes)
        takers = [request for request in requests if request.each.get(kind)]
        required = sum(request.each[kind] * request.number for request in takers)
        if required > available + _ROUNDING:
            keys = "; or ".join(dict.fromkeys(request.keys_to_lower([kind]) for request in takers))
            described = ", ".join(f"{request.description} of {format_resources(request.each)}" for request in takers)
            raise ClusterTooSmallError(
                f"the run needs {required:g} {kind}s at the same time ({described}), but {nodes_have} {available:g}; lower {keys}"
            )


def describe_nodes(labels: Mapping[str, str] | None) -> str:
    """Format nodes with these labels as the beginning of a sentence, such as `the nodes with role=students have`."""
    return f"the nodes with {_format_labels(labels)} have" if labels else "the cluster has"


def _format_labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels.items())


def format_nodes(nodes: Sequence[Resources]) -> str:
    """Format the nodes' resources, such as `2 x 4 CPUs, 1 x 8 CPUs and 1 GPU`."""
    counts = Counter(format_resources(node) for node in nodes)
    return ", ".join(f"{number} x {resources}" for resources, number in counts.items())
