"""Interface of an engine, as the training loop uses it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distcse.trainer.snapshot import Snapshot


class Engine(Protocol):
    """Runs the student's forward pass, backward pass and update across all workers."""

    device: torch.device
    """Device of the model."""

    def forward(self, inputs: object) -> Any:
        """Return the model's output, computed in the engine's precision."""
        ...

    def backward(self, share: Tensor) -> None:
        """Accumulate the gradient of this worker's share of the loss. All workers' shares sum to the global batch's loss."""
        ...

    def step(self, lr: float | Tensor) -> None:
        """Count one batch; after every `gradient_accumulation` batches, clip the gradient and update the weights.

        Args:
            lr: Learning rate. `TorchEngine` also accepts a tensor on its device.
        """
        ...

    def snapshot(self) -> Snapshot | None:
        """Take a snapshot of full weights and moments, without waiting for a GPU. Every worker must call it.

        Returns:
            The snapshot on rank 0; None on other ranks.
        """
        ...

    def close(self) -> None:
        """Release the engine's resources."""
        ...


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
