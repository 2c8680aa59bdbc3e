"""What travels between workers in a step, and how long it is under way."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distcse.planning.machines import Cluster
from distcse.recipe import LoopSection

_LATENCY = 2e-5
"""Seconds of one hop of a collective: an assumption for NCCL between nodes."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one worker sends in a step."""

    gradients: float
    """See `gradient_bytes`."""
    views: float
    """Both views of the global batch gathered, their gradients added on the way back."""
    lists: float
    """Of the teachers' similarities, which it receives."""

    @property
    def total(self) -> float:
        """In and out."""
        return self.gradients + self.views + self.lists


def gradient_bytes(numbers: float, workers: int, training: LoopSection) -> float:
    """Bytes a worker moves in a step, on average, that all have the gradients' sum and the weights after it.

    A ring moves 2 (W - 1) / W of a message for an all-reduce, (W - 1) / W for an all-gather or a reduce-scatter. Stage 0
    all-reduces once an update; stage 1 reduce-scatters and all-gathers once an update; stage 2 reduce-scatters every step;
    stage 3 gathers weights forward and backward every step besides. All is fp32.

    Args:
        numbers: Of the gradients that are sent.
        workers: W.
        training: ZeRO's stage, and steps an update.
    """
    updates = 1 / training.gradient_accumulation
    passes = {0: 2 * updates, 1: 2 * updates, 2: 1 + updates, 3: 3.0}[training.zero_stage]
    return passes * (workers - 1) / workers * 4.0 * numbers


def step_traffic(gradients: float, width: int, rows: float, columns: float, workers: int, teachers: int) -> Traffic:
    """Bytes a worker moves in a step. Views are fp32, gathered and their gradients added by rings.

    Args:
        gradients: Bytes of the gradients.
        width: d, numbers of a vector.
        rows: R of this worker.
        columns: L, length of its lists.
        workers: W.
        teachers: T that answer over the network.
    """
    ring = (workers - 1) / workers
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
