"""What the loop needs of an engine, and what all engines share."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distcse.trainer.checkpoints import ModelState


class Engine(Protocol):
    """Forward, backward and update of the student over all workers."""

    device: torch.device

    def forward(self, inputs: Any) -> Any:
        """The model's answer, under the engine's precision."""
        ...

    def backward(self, share: Tensor) -> None:
        """Gradient of this worker's share of the loss; shares of all workers add up to the loss of the global batch."""
        ...

    def step(self, lr: float | Tensor) -> None:
        """Count one batch; every `gradient_accumulation` batches, clip and move the weights at rate `lr`.

        The plain engine takes a rate that is a tensor on its device, too.
        """
        ...

    def state(self) -> ModelState:
        """Full weights and moments, on every worker (all workers must call).

        What is on a CPU already is not copied: it is of this step until the next one.
        """
        ...

    def close(self) -> None:
        """Free what the engine holds of the process."""
        ...


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that receive a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
