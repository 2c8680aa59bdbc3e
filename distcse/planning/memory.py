"""Estimates a worker's memory: weights, gradients and moments by ZeRO stage, activations, and the host's share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distcse.planning.passes import Pass

STAGES = (0, 1, 2, 3)
_MAX_LIVE = 10**9
"""Parameters that DeepSpeed's stage 3 keeps gathered between two uses: the default of `stage3_max_reuse_distance`."""
_LISTS = 32 * 2**20
"""Largest block of one teacher's similarity lists, in bytes; two are held (see `teachers/ensemble.py`)."""


@dataclass(frozen=True)
class States:
    """Bytes of model states that a worker holds between steps, for one ZeRO stage."""

    weights: float
    gradients: float
    moments: float
    """AdamW's two moments, in fp32."""
    copies: float
    """Copies made by the engine: the flat gradient of an all-reduce, ZeRO's fp32 partition, gathered weights."""

    @property
    def total(self) -> float:
        """Bytes of all model states."""
        return self.weights + self.gradients + self.moments + self.copies


def states(trained: float, stage: int, workers: int) -> States:
    """Return the bytes of model states: per parameter 4 for the weight, 4 for the gradient and 8 for AdamW's moments.

    Stage 1 divides the moments over the workers, stage 2 also the gradients, stage 3 also the weights. DeepSpeed adds an
    fp32 partition in stages 1 to 3. Stage 3 keeps weights gathered that are used again within 10⁹ parameters, which are all
    weights of a sentence encoder.

    Args:
        trained: Number of trained parameters.
        stage: ZeRO stage, 0 to 3.
        workers: Number of workers.

    Source: Rajbhandari et al. 2020, ZeRO.
    """
    full, share = 4.0 * trained, 4.0 * trained / workers
    if stage == 0:
        return States(full, full, 2 * full, full if workers > 1 else 0.0)
    if stage == 3:
        return States(share, share, 2 * share, share + 4.0 * min(trained, _MAX_LIVE))
    return States(full, full if stage == 1 else share, 2 * share, share)


def activation_bytes(work: Pass, kind: str, eager: bool) -> float:
    """Return the bytes of activations that autograd saves in the forward pass.

    A layer saves per token, in elements: the inputs of its linear maps and norms and its queries, keys and values (8 h), the
    feed-forward layer before and after GELU (2 x inner), and L scores of every head. Dropout adds its masks: 2 h, and twice
    the scores. Under autocast, norms save fp32, linear maps bf16, and every weight a bf16 copy. Fused attention saves no
    scores. A dropout mask on a GPU has one byte per element.

    Args:
        work: The training pass.
        kind: `cpu` or `gpu`.
        eager: Whether attention materializes its scores.
    """
    shape, half = work.shape, work.precision != "fp32"
    size = 2 if half else 4
    of_token = float((24 if half else 32) * shape.width + 2 * size * shape.inner)
    scores = float(shape.heads * work.length * size) if eager else 0.0
    if work.dropout:
        mask_size = 1 if kind == "gpu" else size
        of_token += 2 * mask_size * shape.width
        scores += 2 * scores
    copies = 2.0 * shape.layer_weights if half else 0.0
    of_embedding = (4 + (4 if work.dropout else 0) + 12) * shape.width
    spread = (
        (work.tokens - work.linear_tokens) * 3 * size * shape.width
    )  # attention's queries, keys and values include the padding
    layers = work.linear_tokens * shape.linear_layers * of_token + shape.attending_layers * (
        work.tokens * scores + spread
    )
    return layers + work.tokens * of_embedding + shape.layers * copies


def backward_bytes(work: Pass) -> float:
    """Return the bytes of activation gradients alive at once in the backward pass: those of a layer's widest part."""
    return work.linear_tokens * 4.0 * (2 * work.shape.inner + 2 * work.shape.width)


def sampler_bytes(rows: float) -> float:
    """Return the host bytes of a worker's sampler: row ids, the orders of two epochs, and a third one with its permutation."""
    return 5 * 8.0 * rows


def gathered_bytes(trained: float, stage: int) -> float:
    """Return the bytes gathered for a checkpoint on a CPU: ZeRO's partitioned moments, in stage 3 also the weights."""
    return {0: 0.0, 3: 12.0}.get(stage, 8.0) * trained


def lists_bytes(teachers: int) -> float:
    """Return the most bytes that two blocks of every teacher's similarity lists take."""
    return 2.0 * _LISTS * teachers


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes that a worker needs in a training step."""

    stage: int
    states: States
    frozen: float
    """Weights that are not trained: a pooler, a generator, the initial student."""
    activations: float
    """Activations with their gradients in the backward pass, and the loss's matrices."""
    process: float
    """Python and its libraries, or on a GPU the CUDA context."""
    checkpoint: float
    """Gathered on the device for a checkpoint, when there are no activations."""

    @property
    def total(self) -> float:
        """Peak bytes on the device."""
        return self.process + self.frozen + self.states.total + max(self.activations, self.checkpoint)

    @property
    def described(self) -> dict[str, Any]:
        """The bytes as a JSON object."""
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
