"""Estimates the bytes that workers exchange in a step, and how long training waits for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distcse.device_defaults import GPU
from distcse.planning.machines import Cluster
from distcse.recipe import LoopSection
from distcse.trainer.engines.gradient_buckets import BUCKET_BYTES

_BACKWARD_SHARE = 2 / 3
"""Share of a step that its backward pass takes: two of three FLOPs."""
_LATENCY = 2e-5
"""Seconds per hop of a collective; assumed for NCCL between nodes."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one worker moves in a step."""

    gradients: float
    """See `gradient_bytes`."""
    views: float = 0.0
    """Both views of the global batch: all-gathered, and their gradients all-reduced."""
    lists: float = 0.0
    """The teachers' similarity lists that it receives from servers."""
    vectors: float = 0.0
    """The teachers' vectors of the global batch: all-gathered in fp16, where workers compute the lists."""

    @property
    def total(self) -> float:
        """All bytes, in and out."""
        return self.gradients + self.views + self.lists + self.vectors


def gradient_bytes(numbers: float, workers: int, training: LoopSection) -> float:
    """Return the bytes that a worker moves per step, on average, to synchronize gradients and weights in fp32.

    A ring moves 2 (W - 1) / W of a message for an all-reduce, (W - 1) / W for an all-gather or a reduce-scatter. Stage 0
    all-reduces once per update. Stage 1 reduce-scatters and all-gathers once per update. Stage 2 reduce-scatters every
    step. Stage 3 also all-gathers the weights in every forward and backward pass.

    Args:
        numbers: Elements of the gradients that are sent.
        workers: W.
        training: Gives the ZeRO stage and the gradient accumulation.
    """
    updates = 1 / training.gradient_accumulation
    passes = {0: 2 * updates, 1: 2 * updates, 2: 1 + updates, 3: 3.0}[training.zero_stage]
    return passes * (workers - 1) / workers * 4.0 * numbers


def transfer_seconds(traffic: Traffic, workers: int, cluster: Cluster) -> float:
    """Return the seconds of a step's collectives and lists, one after the other and after the backward pass.

    Within a node, the link between two devices limits the rate; across nodes, the network of a node, which a ring enters and
    leaves once.
    """
    if workers == 1:
        return 0.0
    hops = 3 * 2 * math.ceil(math.log2(workers)) * _LATENCY
    served = traffic.lists * min(workers, cluster.per_node) / cluster.network
    return (traffic.total - traffic.lists) / _slowest(workers, cluster) + served + hops


def hidden_seconds(
    traffic: Traffic, workers: int, cluster: Cluster, backward: float, is_recorded: bool = False
) -> float:
    """Return the seconds of `transfer_seconds` during which the backward pass, of `backward` seconds, still computes.

    On GPUs, gradients are sent in buckets as the backward pass completes them. The last bucket is sent after it; so are all
    gradients of recorded steps.
    """
    if workers == 1 or cluster.machine.kind != "gpu" or not GPU.overlaps_reduction or is_recorded:
        return 0.0
    early = traffic.gradients - 2 * (workers - 1) / workers * BUCKET_BYTES
    return min(backward, max(0.0, early) / _slowest(workers, cluster))


def waited_seconds(
    traffic: Traffic, workers: int, cluster: Cluster, computed: float, accumulation: int, is_recorded: bool = False
) -> float:
    """Return the seconds for which a step waits for transfers, after those that the backward pass hides.

    Args:
        traffic: Bytes that a worker moves in a step.
        workers: Number of workers.
        cluster: Where they run.
        computed: Seconds of the step without transfers.
        accumulation: Batches per update, of which the last one's backward pass hides the transfer.
        is_recorded: Whether steps are recorded as CUDA graphs. Default: False.
    """
    backward = _BACKWARD_SHARE * computed / accumulation
    return transfer_seconds(traffic, workers, cluster) - hidden_seconds(
        traffic, workers, cluster, backward, is_recorded
    )


def _slowest(workers: int, cluster: Cluster) -> float:
    """Return the bytes per second of the slowest link that a ring of the workers uses."""
    link = cluster.machine.link
    return link if workers <= cluster.per_node else min(link, cluster.network)
