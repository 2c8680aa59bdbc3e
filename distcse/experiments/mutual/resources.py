"""CPUs and GPUs of the workers of a mutual distillation's groups on a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.placement.resources import Node, ResourceRequest, even_share, nodes_with, refuse_impossible
from distcse.recipe import GroupSection

_SMALLER = {"CPU": "groups.N.cpus_per_worker", "GPU": "groups.N.gpus_per_worker"}
_ALTERNATIVE = "write ray: false to run them one after the other"


def resources_of_groups(groups: Sequence[GroupSection], nodes: Sequence[Node]) -> list[dict[str, float]]:
    """Return the CPUs and GPUs of one worker of each group.

    CPUs that a group does not set are its even share of the nodes. Without gpus_per_worker, each worker gets a GPU if there
    are enough for all; otherwise groups of one worker share the GPUs.

    Args:
        groups: The groups that run at the same time.
        nodes: The nodes of the cluster.

    Raises:
        ClusterTooSmallError: The cluster does not have the resources for all groups at once.
        NodeLabelError: No node has the labels of a group.
    """
    usable = [
        nodes_with(nodes, group.node_labels, f"groups.{number}.node_labels") for number, group in enumerate(groups)
    ]
    workers = sum(group.workers for group in groups)
    total_gpus = sum(node.resources.get("GPU", 0.0) for node in nodes)
    can_share = all(group.workers == 1 for group in groups)
    share = 1.0 if total_gpus >= workers else 1 / -(-workers // total_gpus) if total_gpus >= 1 and can_share else 0.0
    per_worker: list[dict[str, float]] = []
    requests: list[ResourceRequest] = []
    for number, group in enumerate(groups):
        gpus = share if group.gpus_per_worker is None else group.gpus_per_worker
        even = even_share([node.get("CPU", 0.0) for node in usable[number]], _competing_workers(group, groups))
        each = {"CPU": group.cpus_per_worker or even, **({"GPU": gpus} if gpus else {})}
        per_worker.append(each)
        description = f"groups.{number}.workers={group.workers}"
        requests.append(
            ResourceRequest(
                description, group.workers, each, group.node_labels, "groups.N.workers", _SMALLER, _ALTERNATIVE
            )
        )
    refuse_impossible(requests, nodes)
    return per_worker


def _competing_workers(group: GroupSection, groups: Sequence[GroupSection]) -> int:
    """Count the workers of all groups that may run on a group's nodes, including its own."""
    labels = (group.node_labels or {}).items()
    return sum(
        other.workers
        for other in groups
        if all((other.node_labels or {}).get(name, value) == value for name, value in labels)
    )
