"""Where functions run that need one device each, such as a model's evaluation: on GPUs, on nodes, or in the run's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distcse.placement.cluster import Labels, Paths
from distcse.placement.resources import Node, Resources, count_fitting, nodes_with

_HEARTBEAT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class DeviceOptions:
    """Which nodes can run a set of functions, and what they must see."""

    labels: Mapping[str, Labels] = field(default_factory=lambda: {"": None})
    """Labels of nodes that see the run's files, by recipe key. Those whose nodes have GPUs are preferred, then earlier ones."""
    written: Paths = field(default_factory=dict)
    """Folders that the functions read and write, by recipe key."""
    read: Paths = field(default_factory=dict)
    """Files and folders that the functions only read, by recipe key."""
    uses_gpu: bool = True
    """Whether the functions are faster on a GPU."""
    heartbeat_timeout_s: float = _HEARTBEAT_TIMEOUT_S
    """Seconds without an answer after which a process counts as hung."""


@dataclass(frozen=True)
class OwnNode:
    """The node of the run's process."""

    id: str
    free_memory: float
    """Bytes that the process can still allocate."""


@dataclass(frozen=True)
class DevicePlan:
    """Identical processes, each of which calls one function after the other."""

    number: int
    """Processes at the same time."""
    each: Resources
    """Resources of one process: a full GPU where there is one, CPUs, and `memory` in bytes."""
    labels: Labels
    """Required labels of their nodes; None is any node."""


class SelectedNodes(NamedTuple):
    """The nodes that run a set of functions."""

    labels: Labels
    has_gpus: bool
    """Whether the functions run on GPUs."""


def select_nodes(options: DeviceOptions, nodes: Sequence[Node]) -> SelectedNodes:
    """Select the first labels whose nodes have GPUs that the functions may use; without any, the first labels.

    Raises:
        NodeLabelError: No node has the labels of a key.
    """
    usable = {key: nodes_with(nodes, labels, key) for key, labels in options.labels.items()}
    for key, found in usable.items():
        if options.uses_gpu and any(node.get("GPU") for node in found):
            return SelectedNodes(options.labels[key], True)
    return SelectedNodes(next(iter(options.labels.values())), False)


def plan_devices(
    options: DeviceOptions, nodes: Sequence[Node], own: OwnNode, calls: int, memory_bytes: float
) -> DevicePlan | None:
    """Decide where functions run.

    With GPUs, there is one process per GPU. Without, there is one per node, or no process at all: the run's process calls the
    functions itself if it is the only node, or if one node suffices and its own one has CPUs and the memory.

    Args:
        options: The nodes that can run them.
        nodes: The nodes of the cluster.
        own: The node of the run's process.
        calls: Number of functions.
        memory_bytes: Estimated memory of a process. If no node has as much, a process gets all memory of a node.

    Returns:
        The processes to start; None if the run's process calls the functions.

    Raises:
        NodeLabelError: No node has the labels of a key.
    """
    selected = select_nodes(options, nodes)
    resources = [node.resources for node in nodes if node.has(selected.labels)]
    if selected.has_gpus:
        resources = [node for node in resources if node.get("GPU")]
        gpus = min(1.0, max(node["GPU"] for node in resources))
        number = min(calls, count_fitting(resources, {"GPU": gpus}))
        amounts = {"GPU": gpus}
    else:
        number = min(calls, sum(node.get("CPU", 0.0) >= 1 for node in resources)) or 1
        if len(nodes) == 1 or (number == 1 and _has_room(own, nodes, selected.labels, memory_bytes)):
            return None
        amounts = {}
    memory = min(memory_bytes, max(node.get("memory", 0.0) for node in resources))
    each = {"CPU": _even_cpus(resources, amounts, number), **amounts, "memory": float(int(memory))}
    return DevicePlan(min(number, max(1, count_fitting(resources, each))), each, selected.labels)


def _even_cpus(nodes: Sequence[Resources], each: Resources, number: int) -> float:
    """Return the largest number of full CPUs per process with which `number` processes of these resources fit."""
    shares = {float(int(node.get("CPU", 0.0) / count)) for node in nodes for count in range(1, number + 1)}
    fitting = (share for share in shares if count_fitting(nodes, {**each, "CPU": share}) >= number)
    return max(fitting, default=0.0)


def _has_room(own: OwnNode, nodes: Sequence[Node], labels: Labels, memory_bytes: float) -> bool:
    """Whether the run's own node has the labels, CPUs for work, and the memory. A head that only coordinates has 0 CPUs."""
    return own.free_memory >= memory_bytes and any(
        node.id == own.id and node.has(labels) and node.resources.get("CPU", 0.0) >= 1 for node in nodes
    )
