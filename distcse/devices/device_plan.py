"""Where functions run that need one device each, such as a model's evaluation: on GPUs, on nodes, or in the run's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distcse.devices.cluster import Labels, Paths
from distcse.devices.resources import Node, Resources, count_fitting, no_node_error

GIB = 2.0**30
HEARTBEAT_TIMEOUT_S = 60.0
_MOST_OF_A_NODE = 0.75
"""Part of a node's memory that a process reserves which needs more: no second one fits, and other jobs may hold a little."""


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
    gpus: float = 1.0
    """GPUs of one process, or the part of one that it shares with others."""
    can_wait: bool = False
    """Whether functions for which no GPU is free may wait for further nodes, as an autoscaler starts them."""
    trains: bool = False
    """Whether the functions train, for which their processes get the environment of training workers."""
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    """Seconds without an answer after which a process counts as hung."""
    owner: str = "distcse"
    """Name of the run or recipe, part of the processes' names."""


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
    """What one process reserves: a GPU (`DeviceOptions.gpus`) where there is one, else a CPU, and `memory` in bytes."""
    labels: Labels
    """Required labels of their nodes; None is any node."""
    waiting: int = 0
    """Processes of `number` that wait for further nodes."""

    def threads_on(self, node: Resources) -> int:
        """Return the threads of one process on a node: its share of the node's CPUs, which it does not reserve."""
        processes = min(self.number, count_fitting([node], self.each)) if self.each.get("GPU") else 1
        return max(1, int(node.get("CPU", 0.0) / max(1, processes)))


class SelectedNodes(NamedTuple):
    """The nodes that run a set of functions."""

    labels: Labels
    has_gpus: bool
    """Whether the functions run on GPUs."""


def select_nodes(options: DeviceOptions, nodes: Sequence[Node]) -> SelectedNodes:
    """Select the first labels whose nodes have GPUs that the functions may use; without any, the first that a node has."""
    usable = [labels for labels in options.labels.values() if any(node.has(labels) for node in nodes)]
    if not usable:
        raise no_node_error(options.labels)
    for labels in usable:
        if options.uses_gpu and any(node.has(labels) and node.resources.get("GPU") for node in nodes):
            return SelectedNodes(labels, True)
    return SelectedNodes(usable[0], False)


def plan_devices(
    options: DeviceOptions, nodes: Sequence[Node], own: OwnNode, calls: int, memory_bytes: float
) -> DevicePlan | None:
    """Decide where functions run.

    With GPUs, there is one process per GPU, or per part of one; with `DeviceOptions.can_wait` one per function. Without, there
    is one per node, or no process at all: the run's process calls the functions itself if it is the only node, or if one node
    suffices and its own one has CPUs and the memory.

    A process reserves little, because other jobs may hold CPUs of every node for as long as they run: its GPU, or without GPUs
    one CPU, and its memory: most of the largest node's, if no node has as much. It computes with the threads of
    `DevicePlan.threads_on`. The result is None if the run's process calls the functions.
    """
    selected = select_nodes(options, nodes)
    resources = [node.resources for node in nodes if node.has(selected.labels)]
    if selected.has_gpus:
        resources = [node for node in resources if node.get("GPU")]
        each = {"GPU": min(options.gpus, max(node["GPU"] for node in resources))}
    else:
        each = {"CPU": 1.0 if any(node.get("CPU", 0.0) >= 1 for node in resources) else 0.0}
    largest = max(node.get("memory", 0.0) for node in resources)
    each["memory"] = float(int(memory_bytes if memory_bytes <= largest else _MOST_OF_A_NODE * largest))
    fitting = [count_fitting([node], each) for node in resources]
    number = max(1, min(calls, sum(fitting) if selected.has_gpus else sum(map(bool, fitting))))
    waiting = calls - number if selected.has_gpus and options.can_wait else 0
    if not selected.has_gpus and (
        len(nodes) == 1 or (number == 1 and _has_room(own, nodes, selected.labels, memory_bytes))
    ):
        return None
    return DevicePlan(number + waiting, each, selected.labels, waiting)


def _has_room(own: OwnNode, nodes: Sequence[Node], labels: Labels, memory_bytes: float) -> bool:
    """Whether the run's own node has the labels, CPUs for work, and the memory. A head that only coordinates has 0 CPUs."""
    return own.free_memory >= memory_bytes and any(
        node.id == own.id and node.has(labels) and node.resources.get("CPU", 0.0) >= 1 for node in nodes
    )
