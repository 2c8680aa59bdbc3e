"""Estimates a worker's memory: weights, gradients and moments by ZeRO stage, and the host's share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STAGES = (0, 1, 2, 3)
FITS = 0.92
"""Fraction of a device's memory that a plan may fill; the allocator needs the rest."""
_MAX_LIVE = 10**9
"""Parameters that DeepSpeed's stage 3 keeps gathered between two uses: the default of `stage3_max_reuse_distance`."""


@dataclass(frozen=True)
class States:
    """Bytes of model states that a worker holds between steps, for one ZeRO stage."""

    weights: float
    gradients: float
    moments: float
    """AdamW's two moments, in fp32."""
    copies: float
    """Copies made by the engine: the flat gradient of an all-reduce, ZeRO's fp32 partition, gathered weights."""


def states(trained: float, stage: int, workers: int) -> States:
    """Return the bytes of model states: per parameter 4 for the weight, 4 for the gradient and 8 for AdamW's moments.

    Stage 1 divides the moments over the workers, stage 2 also the gradients, stage 3 also the weights. DeepSpeed adds an
    fp32 partition in stages 1 to 3. Stage 3 keeps weights gathered that are used again within 10⁹ parameters, which are all
    weights of a sentence encoder.

    Source: Rajbhandari et al. 2020, ZeRO.
    """
    full, share = 4.0 * trained, 4.0 * trained / workers
    if stage == 0:
        return States(full, full, 2 * full, full if workers > 1 else 0.0)
    if stage == 3:
        return States(share, share, 2 * share, share + 4.0 * min(trained, _MAX_LIVE))
    return States(full, full if stage == 1 else share, 2 * share, share)


def gathered_bytes(trained: float, stage: int) -> float:
    """Return the bytes gathered for a checkpoint on a CPU: ZeRO's partitioned moments, in stage 3 also the weights."""
    return {0: 0.0, 3: 12.0}.get(stage, 8.0) * trained


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
        held: float = sum(vars(self.states).values())
        return self.process + self.frozen + held + max(self.activations, self.checkpoint)

    @property
    def described(self) -> dict[str, Any]:
        """The bytes as a JSON object."""
        own = {name: value for name, value in vars(self).items() if name != "states"}
        return {**own, **vars(self.states), "total": self.total}
