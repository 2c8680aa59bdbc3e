"""The engine of PyTorch alone: same interface, same numbers, no DeepSpeed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from distcse.encoder.device import device_here
from distcse.recipe import LoopSection
from distcse.training.checkpoint import TrainingState
from distcse.training.engines.adamw import OneCallAdamW
from distcse.training.engines.engine import trained_parameters
from distcse.training.workers import add_over_workers, world_size


class PlainEngine:
    """PyTorch alone: AdamW, clipping, accumulation, gradients averaged by one all-reduce."""

    def __init__(self, model: nn.Module, training: LoopSection, restored: TrainingState | None) -> None:
        self.device = torch.device(device_here())
        self._model = model.to(self.device)
        self._training = training
        self._parameters = trained_parameters(model)
        self._batches, self._updates = 0, 0 if restored is None else restored.updates
        moments = None if restored is None else restored.moments
        self._optimizer = OneCallAdamW(self._parameters, training, self._updates, moments)

    def forward(self, inputs: Any) -> Any:
        autocast = (
            torch.autocast(self.device.type, torch.bfloat16) if self._training.precision == "bf16" else nullcontext()
        )
        with autocast:
            return self._model(inputs)

    def backward(self, share: Tensor) -> None:
        # Averaging over workers divides by their number, accumulation by its own: both are undone or done here, once.
        (share * world_size() / self._training.gradient_accumulation).backward()

    def step(self, lr: float) -> None:
        self._batches += 1
        if self._batches % self._training.gradient_accumulation:
            return
        self._average_gradients()
        self._optimizer.step(lr)
        self._optimizer.forget()
        self._updates += 1

    def state(self) -> TrainingState:
        weights = {name: tensor.detach().cpu() for name, tensor in self._model.state_dict().items()}
        moments = {
            name: {kind: tensor.cpu() for kind, tensor in kinds.items()}
            for name, kinds in self._optimizer.moments.items()
        }
        return TrainingState(weights, moments, self._updates)

    def close(self) -> None:
        self._optimizer.forget()

    def _average_gradients(self) -> None:
        if world_size() == 1:
            return
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        add_over_workers(flat).div_(world_size())
        for gradient, averaged in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(averaged.view_as(gradient))
