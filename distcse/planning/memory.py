"""Memory of one worker: weights, gradients, moments by ZeRO stage, activations; and of the host that feeds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distcse.planning.passes import Pass

STAGES = (0, 1, 2, 3)
_MAX_LIVE = 10**9
"""Parameters that DeepSpeed's stage 3 keeps gathered between two uses, by its default (`stage3_max_reuse_distance`)."""
_LISTS = 32 * 2**20
"""Bytes of one block of lists of one teacher, at most; two are held (see `teachers/ensemble.py`)."""


@dataclass(frozen=True)
class States:
    """Bytes of what a worker keeps from step to step, for one ZeRO stage."""

    weights: float
    gradients: float
    moments: float
    """AdamW's two, in fp32."""
    copies: float
    """Made by the engine: the flat gradient of an all-reduce, ZeRO's fp32 partition, gathered weights."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.moments + self.copies


def states(trained: float, stage: int, workers: int) -> States:
    """Bytes of so many trained parameters, all in fp32: 4 each for weight and gradient, 8 for AdamW's moments.

    Stage 1 divides the moments over the workers, stage 2 the gradients too, stage 3 the weights too. DeepSpeed adds an fp32
    partition to train on (stages 1 to 3), and stage 3 keeps weights gathered that are used again within 10⁹ parameters: all
    of a sentence encoder's.
    """
    full, share = 4.0 * trained, 4.0 * trained / workers
    if stage == 0:
        return States(full, full, 2 * full, full if workers > 1 else 0.0)
    if stage == 3:
        return States(share, share, 2 * share, share + 4.0 * min(trained, _MAX_LIVE))
    return States(full, full if stage == 1 else share, 2 * share, share)


def activation_bytes(work: Pass, kind: str, eager: bool) -> float:
    """Bytes kept from the forward pass for the backward one.

    A layer keeps for every token, in elements: the inputs of its maps and norms and its queries, keys and values (8 h), the
    feed-forward part before and after GELU (2 x inner), and of every head a row of L scores; dropout keeps its noise beside
    (2 h, and twice the scores). Under autocast norms keep fp32, maps bf16, and every weight a bf16 copy. Fused attention
    keeps no scores; a GPU's dropout one byte an element.
    """
    shape, half = work.shape, work.precision != "fp32"
    size = 2 if half else 4
    of_token = float((24 if half else 32) * shape.width + 2 * size * shape.inner)
    scores = float(shape.heads * work.length * size) if eager else 0.0
    if work.dropout:
        noise = 1 if kind == "gpu" else size
        of_token += 2 * noise * shape.width
        scores += 2 * scores
    copies = 2.0 * shape.layer_weights if half else 0.0
    of_embedding = (4 + (4 if work.dropout else 0) + 12) * shape.width
    spread = (
        (work.tokens - work.mapped) * 3 * size * shape.width
    )  # queries, keys and values are kept as attention sees them
    layers = work.mapped * shape.linear_layers * of_token + shape.attending_layers * (work.tokens * scores + spread)
    return layers + work.tokens * of_embedding + shape.layers * copies


def backward_bytes(work: Pass) -> float:
    """Bytes of gradients of activations that are alive together on the way back: of the widest part of one layer."""
    return work.mapped * 4.0 * (2 * work.shape.inner + 2 * work.shape.width)


def sampler_bytes(rows: float) -> float:
    """Host memory of a worker's order of rows: the rows, two epochs' orders, and while a third is made it and a permutation."""
    return 5 * 8.0 * rows


def gathered_bytes(trained: float, stage: int) -> float:
    """Bytes gathered for a checkpoint on a CPU: of what ZeRO keeps in parts, the moments, and in stage 3 the weights too."""
    return {0: 0.0, 3: 12.0}.get(stage, 8.0) * trained


def lists_bytes(teachers: int) -> float:
    """Two blocks of lists of every teacher, at most."""
    return 2.0 * _LISTS * teachers


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes of one worker in a training step."""

    stage: int
    states: States
    frozen: float
    """Weights that do not learn: a pooler, a generator, the student as it began."""
    activations: float
    """With the gradients of activations on the way back, and the objective's matrices."""
    process: float
    """Python and its libraries; on a GPU the CUDA context."""
    checkpoint: float
    """Gathered on the device for a checkpoint, where no activations are: it counts where it is more than they are."""

    @property
    def total(self) -> float:
        """At its highest, on the device."""
        return self.process + self.frozen + self.states.total + max(self.activations, self.checkpoint)

    @property
    def described(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "stage": self.stage,
            "weights": self.states.weights,
            "gradients": self.states.gradients,
            "moments": self.states.moments,
            "copies": self.states.copies,
            "frozen": self.frozen,
            "activations": self.activations,
            "checkpoint": self.checkpoint,
            "process": self.process,
            "total": self.total,
        }
