"""The engine of PyTorch alone: same interface, same numbers, no DeepSpeed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from distcse.encoder.device import device_here
from distcse.recipe import LoopSection
from distcse.training.checkpoint import TrainingState
from distcse.training.engines.engine import make_adamw, trained_parameters
from distcse.training.workers import add_over_workers, world_size


class PlainEngine:
    """PyTorch alone: AdamW, clipping, accumulation, gradients averaged by one all-reduce."""

    def __init__(self, model: nn.Module, training: LoopSection, restored: TrainingState | None) -> None:
        self.device = torch.device(device_here())
        self._model = model.to(self.device)
        self._training = training
        self._parameters = trained_parameters(model)
        self._optimizer = make_adamw(self._parameters.values(), training)
        self._batches = 0
        self._updates = 0
        if restored is not None:
            self._restore(restored)

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
        if self._training.gradient_clipping:
            self._clip(self._training.gradient_clipping)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._updates += 1

    def state(self) -> TrainingState:
        weights = {name: tensor.detach().cpu() for name, tensor in self._model.state_dict().items()}
        moments = {
            name: {kind: self._optimizer.state[p][kind].cpu() for kind in ("exp_avg", "exp_avg_sq")}
            for name, p in self._parameters.items()
            if p in self._optimizer.state
        }
        return TrainingState(weights, moments, self._updates)

    def close(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _clip(self, longest: float) -> None:
        """A norm that is not finite makes the gradients NaN: divided by it they would be zero, and nobody would see."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        norm = torch.where(norm.isfinite(), norm, torch.nan)
        nn.utils.clip_grads_with_norm_(self._parameters.values(), longest, norm)

    def _average_gradients(self) -> None:
        if world_size() == 1:
            return
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        add_over_workers(flat).div_(world_size())
        for gradient, averaged in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(averaged.view_as(gradient))

    def _restore(self, restored: TrainingState) -> None:
        self._updates = restored.updates
        for name, moments in restored.moments.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = {
                "step": torch.tensor(
                    float(restored.updates), device=self.device if self.device.type != "cpu" else None
                ),
                **{kind: tensor.to(self.device) for kind, tensor in moments.items()},
            }
