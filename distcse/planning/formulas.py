"""The formulas of a plan: seconds of a pass and of a step, bytes of a worker and of its network traffic.

With P parameters of the layers' linear maps, L layers of width h and texts of n tokens, a training step takes 6·P + 12·L·h·n
FLOPs per token and a frozen pass a third of that; element-wise operations move bytes in proportion to L·h. The constants are
those of BERT and MiniLM, counted on PyTorch's fake tensors and timed on an H100 and three kinds of CPU (benchmarks/results).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from distcse.device_defaults import BY_KIND
from distcse.planning.machines import NETWORK, Cluster, Machine
from distcse.planning.shapes import Shape
from distcse.recipe import LoopSection

STAGES = (0, 1, 2, 3)
"""ZeRO stages."""
FITS = 0.92
"""Fraction of a device's memory that a plan may fill; the allocator needs the rest."""
PROCESS = 0.45 * 2**30
"""Bytes of a process after its imports."""
TOKENIZED = 12_000.0
"""Sentences per second that one thread tokenizes."""
DISK = 2e8
"""Bytes per second of a checkpoint: written and synced."""
_MOVED = {("gpu", True): 290.0, ("gpu", False): 90.0, ("cpu", True): 520.0, ("cpu", False): 160.0}
"""Bytes that element-wise operations move per token and L·h, by device and whether the pass is a training step's."""
_SAVED = {"gpu": (67.0, 50.0), "cpu": (82.0, 62.0)}
"""Bytes that autograd saves per token and L·h, by device: in fp32, and in half precision."""
_LAYER_CALLS = {("gpu", True): 3.5e-3, ("gpu", False): 1.4e-3, ("cpu", True): 2e-3, ("cpu", False): 0.6e-3}
"""Seconds for the host to launch a layer's operations from Python, by device and whether the pass is a training step's."""
_STEP_CALLS = 0.5e-3
"""Seconds of a step that keep the host busy besides; a step that is recorded as a CUDA graph takes it only this long."""
_ADAMW_BYTES = 40.0
"""Bytes read and written per parameter: weight, gradient, two moments, and before that the gradient's norm and clipping."""
_LATENCY = 2e-5
"""Seconds per hop of a collective; assumed for NCCL between nodes."""


@dataclass(frozen=True)
class Terms:
    """Seconds of a step by resource."""

    math: float = 0.0
    """Matrix products."""
    traffic: float = 0.0
    """Memory traffic of all other operations."""
    host: float = 0.0
    """Launching operations: Python, dispatch, kernel launches."""
    network: float = 0.0
    """Transfers between workers."""
    waiting: float = 0.0
    """Waiting for teachers' lists."""

    def __add__(self, other: Terms) -> Terms:
        return Terms(*(left + right for left, right in zip(vars(self).values(), vars(other).values(), strict=True)))

    def seconds(self, kind: str) -> float:
        """Return the total: a GPU overlaps with its host, so the longer counts; on a CPU (`kind` is `cpu`) both add up."""
        device = self.math + self.traffic
        waits = self.network + self.waiting
        return (device + self.host if kind == "cpu" else max(device, self.host)) + waits

    @property
    def binding(self) -> str:
        """Name of the longest term: the bottleneck."""
        names = ("matrix products", "memory traffic", "host and launches", "network", "teachers' lists")
        return max(zip(vars(self).values(), names, strict=True), key=lambda term: term[0])[1]


@dataclass(frozen=True)
class Pass:
    """A forward pass, or a training step's forward and backward pass, over texts of equal length."""

    shape: Shape
    texts: float
    length: float
    """Tokens per text, padding included."""
    training: bool = False
    precision: str = "fp32"

    @property
    def tokens(self) -> float:
        """Tokens of all texts, padding included."""
        return self.texts * self.length

    @property
    def flops(self) -> float:
        """FLOPs of matrix products and attention."""
        per_token = 2.0 * self.shape.matrices + 4.0 * self.shape.layers * self.shape.width * self.length
        return (3.0 if self.training else 1.0) * per_token * self.tokens

    @property
    def _size(self) -> float:
        return self.tokens * self.shape.layers * self.shape.width

    def saved_bytes(self, kind: str) -> float:
        """Return the bytes of activations that a training step holds on a `cpu` or `gpu`, with those of a layer's backward."""
        full, half = _SAVED[kind]
        backward = 40.0 * self.tokens * self.shape.width
        if self.precision == "fp32":
            return full * self._size + backward
        return half * self._size + backward + 2.0 * self.shape.matrices  # autocast's copies of the weights

    def terms(self, machine: Machine, batches: float = 1.0) -> Terms:
        """Return the seconds on a machine, by resource, in a number of batches."""
        moved = _MOVED[machine.kind, self.training] * self._size
        calls = _LAYER_CALLS[machine.kind, self.training] * self.shape.layers * batches
        return Terms(self.flops / machine.rate(self.precision), moved / machine.bandwidth, calls)

    def batched_seconds(self, machine: Machine, batch_tokens: int | None = None) -> float:
        """Return the seconds of a frozen model's pass over all texts, in batches of `batch_tokens` or the device's tokens."""
        size = batch_tokens or BY_KIND[machine.kind].frozen_batch_tokens
        return self.terms(machine, max(1.0, self.tokens / size)).seconds(machine.kind)


def with_update(terms: Terms, trained: float, cluster: Cluster, workers: int, section: LoopSection) -> Terms:
    """Add to a step's passes AdamW's update, the sum of the gradients, and what a recorded step saves the host.

    Args:
        terms: The seconds of passes.
        trained: Trained parameters.
        cluster: Where it runs.
        workers: Number of workers, which share the update with ZeRO.
        section: Gives ZeRO stage, gradient accumulation and `cuda_graphs`.
    """
    machine, mode = cluster.machine, section.cuda_graphs
    by_default = workers == 1 and section.gradient_accumulation == 1 and not section.needs_deepspeed
    records = machine.kind == "gpu" and (mode == "on" or (mode == "auto" and by_default))
    moved = _ADAMW_BYTES * trained / (workers if section.zero_stage else 1) / section.gradient_accumulation
    host = 0.0 if records else terms.host
    sent = transfer_seconds(gradient_bytes(trained, workers, section), workers, cluster)
    return Terms(terms.math, terms.traffic + moved / machine.bandwidth, host + _STEP_CALLS, terms.network + sent)


def gradient_bytes(numbers: float, workers: int, section: LoopSection) -> float:
    """Return the bytes that a worker moves per step, on average, to synchronize gradients and weights in fp32.

    A ring moves 2 (W - 1) / W of a message for an all-reduce, (W - 1) / W for an all-gather or a reduce-scatter. Stage 0
    all-reduces once per update. Stage 1 reduce-scatters and all-gathers once per update. Stage 2 reduce-scatters every
    step. Stage 3 also all-gathers the weights in every forward and backward pass.
    """
    updates = 1 / section.gradient_accumulation
    passes = {0: 2 * updates, 1: 2 * updates, 2: 1 + updates, 3: 3.0}[section.zero_stage]
    return passes * (workers - 1) / workers * 4.0 * numbers


def transfer_seconds(size: float, workers: int, cluster: Cluster) -> float:
    """Return the seconds of collectives of `size` bytes: a ring runs at its slowest link, over nodes at a node's network."""
    if workers == 1:
        return 0.0
    link = cluster.machine.link if workers <= cluster.per_node else min(cluster.machine.link, NETWORK)
    return size / link + 6 * math.ceil(math.log2(workers)) * _LATENCY


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes that a worker needs in a training step, at a ZeRO stage."""

    stage: int
    weights: float
    gradients: float
    moments: float
    """AdamW's two moments, in fp32."""
    copies: float
    """Copies made by the engine: the flat gradient of an all-reduce, ZeRO's fp32 partition, gathered weights."""
    frozen: float
    """Weights that are not trained."""
    activations: float
    process: float = PROCESS
    """Python and its libraries, or on a GPU the CUDA context."""

    @classmethod
    def of(cls, trained: float, stage: int, workers: int, frozen: float, activations: float) -> WorkerMemory:
        """Return the bytes per parameter: 4 for the weight, 4 for the gradient and 8 for AdamW's moments.

        Stage 1 divides the moments over the workers, stage 2 also the gradients, stage 3 also the weights. DeepSpeed adds an
        fp32 partition in stages 1 to 3; stage 3 keeps all weights of a sentence encoder gathered.

        Source: Rajbhandari et al. 2020, ZeRO.
        """
        full, share = 4.0 * trained, 4.0 * trained / workers
        held = {
            0: (full, full, 2 * full, full if workers > 1 else 0.0),
            1: (full, full, 2 * share, share),
            2: (full, share, 2 * share, share),
            3: (share, share, 2 * share, share + full),
        }
        return cls(stage, *held[stage], frozen, activations)

    @property
    def total(self) -> float:
        """Peak bytes on the device."""
        total: float = sum(size for name, size in vars(self).items() if name != "stage")
        return total

    @property
    def described(self) -> dict[str, Any]:
        """The bytes as a JSON object."""
        return {**vars(self), "total": self.total}


def gib(size: float) -> str:
    """Format bytes in GiB."""
    return f"{size / 2**30:,.2f} GiB"


def span(seconds: float) -> str:
    """Format seconds in a readable unit."""
    for unit, name in ((86400 * 365, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.1f} s" if seconds >= 1 or not seconds else ms(seconds)


def ms(seconds: float) -> str:
    """Format seconds in milliseconds."""
    seconds = round(seconds, 9)  # removes rounding errors of sums
    return f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.2f} s"


def size_text(size: float) -> str:
    """Format bytes in a readable unit."""
    units = ((15, "PB"), (12, "TB"), (9, "GB"), (6, "MB"), (3, "kB"))
    return next((f"{size / 10**power:,.3g} {name}" for power, name in units if size >= 10**power), f"{size:.0f} B")
