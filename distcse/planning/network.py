"""What travels between workers in a step, and how long it is under way."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distcse.planning.machines import Cluster

_LATENCY = 2e-5
"""Seconds of one hop of a collective: an assumption for NCCL between nodes."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one worker sends in a step."""

    gradients: float
    """All-reduce of the gradients (stage 0), reduce-scatter and all-gather (1, 2), and gathered weights once more (3)."""
    views: float
    """Both views of the global batch gathered, their gradients added on the way back."""
    lists: float
    """Of the teachers' similarities, which it receives."""

    @property
    def total(self) -> float:
        """In and out."""
        return self.gradients + self.views + self.lists


def step_traffic(
    trained: float, width: int, rows: float, columns: float, workers: int, stage: int, teachers: int
) -> Traffic:
    """Bytes a worker moves in a step.

    A ring moves 2 (W - 1) / W of a message for an all-reduce, (W - 1) / W for an all-gather or a reduce-scatter. Gradients and
    views are fp32.

    Args:
        trained: Parameters with a gradient.
        width: d, numbers of a vector.
        rows: R of this worker.
        columns: L, length of its lists.
        workers: W.
        stage: ZeRO's.
        teachers: T that answer over the network.
    """
    ring = (workers - 1) / workers
    gradients = (3 if stage == 3 else 2) * ring * 4.0 * trained
    both_views = 2 * rows * workers * width * 4.0
    return Traffic(gradients, (ring + 2 * ring) * both_views, teachers * rows * columns * 4.0 if workers > 1 else 0.0)


def transfer_seconds(traffic: Traffic, workers: int, cluster: Cluster) -> float:
    """Seconds of a step's collectives and lists, nothing hidden behind the backward pass: the engines hide nothing.

    Inside a node the link between two devices counts, over several the network of a node, which all of its devices share in
    a ring that enters and leaves every node once.
    """
    if workers == 1:
        return 0.0
    slowest = cluster.machine.link if workers <= cluster.per_node else min(cluster.machine.link, cluster.network)
    hops = 3 * 2 * math.ceil(math.log2(workers)) * _LATENCY
    served = traffic.lists * min(workers, cluster.per_node) / cluster.network
    return (traffic.gradients + traffic.views) / slowest + served + hops
