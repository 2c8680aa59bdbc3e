"""The engine of PyTorch alone: same interface, same numbers, no DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from distcse.device import default_device
from distcse.models.precision import arithmetic
from distcse.recipe import LoopSection, decided
from distcse.trainer.checkpoints import ModelState
from distcse.trainer.distributed import all_reduce_sum, world_size
from distcse.trainer.engines.engine import trained_parameters
from distcse.trainer.engines.fused_adamw import FusedAdamW

MANY = 4096
"""Rows of an embedding that a batch leaves mostly alone."""


class TorchEngine:
    """PyTorch alone: AdamW, clipping, accumulation, gradients summed over workers by one all-reduce."""

    def __init__(self, model: nn.Module, training: LoopSection, restored: ModelState | None) -> None:
        self.device = torch.device(default_device())
        self._model = model.to(self.device)
        self._training = training
        self._parameters = trained_parameters(model)
        self._words: set[Tensor] = words_of(model) if self.device.type == "cpu" else set()
        self._batches = 0
        updates, moments = (0, None) if restored is None else (restored.updates, restored.moments)
        self._optimizer = FusedAdamW(self._parameters, training, updates, moments)

    def forward(self, inputs: Any) -> Any:
        with arithmetic(decided(self._training.precision), self.device):
            return self._model(inputs)

    def backward(self, share: Tensor) -> None:
        (share / self._training.gradient_accumulation).backward()

    def step(self, lr: float | Tensor) -> None:
        self._batches += 1
        if self._batches % self._training.gradient_accumulation:
            return
        sum_over_workers(self._parameters.values(), self._words)
        self._optimizer.step(lr)
        self._optimizer.forget()

    def state(self) -> ModelState:
        weights = {name: tensor.detach().cpu() for name, tensor in self._model.state_dict().items()}
        moments = {
            name: {kind: tensor.cpu() for kind, tensor in kinds.items()}
            for name, kinds in self._optimizer.moments.items()
        }
        return ModelState(weights, moments, self._optimizer.updates)

    def close(self) -> None:
        self._optimizer.forget()


def words_of(model: nn.Module) -> set[Tensor]:
    """Weights of the embeddings that have many more rows than a batch touches."""
    return {part.weight for part in model.modules() if isinstance(part, nn.Embedding) and part.num_embeddings >= MANY}


def sum_over_workers(parameters: Iterable[nn.Parameter], words: Set[Tensor] = frozenset()) -> None:
    """Gradients of all workers added up, by one all-reduce.

    Of words' embeddings only rows are sent that are not zero on all workers: those of the batch's words. They are most of what a
    small student has, and a batch has a twentieth of them. Which rows they are is asked of the device, so this is for CPUs.
    """
    if world_size() == 1:
        return
    gradients = [(p in words, p.grad) for p in parameters if p.grad is not None]
    whole = [gradient for is_table, gradient in gradients if not is_table]
    tables = [gradient for is_table, gradient in gradients if is_table]
    rows = _seen_anywhere([(table.amax(dim=1) != 0) | (table.amin(dim=1) != 0) for table in tables])
    sent = [*whole, *(table[those] for table, those in zip(tables, rows, strict=True))]
    summed = all_reduce_sum(torch.cat([part.flatten() for part in sent])).split([part.numel() for part in sent])
    totals = [total.view_as(part) for part, total in zip(sent, summed, strict=True)]
    for gradient, total in zip(whole, totals, strict=False):
        gradient.copy_(total)
    for table, those, total in zip(tables, rows, totals[len(whole) :], strict=True):
        table.index_copy_(0, those, total)


def _seen_anywhere(seen: Sequence[Tensor]) -> list[Tensor]:
    """(n,) whether this worker has each row, of each table -> row ids that any worker has."""
    if not seen:
        return []
    workers = all_reduce_sum(torch.cat(list(seen)).int())
    return [numbers.nonzero()[:, 0] for numbers in workers.split([len(each) for each in seen])]
