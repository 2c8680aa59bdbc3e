"""The engine without DeepSpeed: same interface, same numerical results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from distcse.devices.device import arithmetic, default_device
from distcse.devices.distributed import all_reduce_sum, rank, world_size
from distcse.recipe import LoopSection, decided
from distcse.training.checkpoint_files import ModelState
from distcse.training.engines.fused_adamw import FusedAdamW, trained_parameters
from distcse.training.snapshot import Snapshot, entries_of, take_snapshot

MIN_TABLE_ROWS = 4096
"""Smallest embedding table whose gradient is sent by rows: a batch touches few of its rows."""


class TorchEngine:
    """Trains with plain PyTorch: AdamW, clipping, accumulation, and gradients summed over workers after the backward pass."""

    def __init__(
        self, model: nn.Module, training: LoopSection, restored: ModelState | None, records_steps: bool = False
    ) -> None:
        self.device = torch.device(default_device())
        self.model = model.to(self.device)
        self._training = training
        self.parameters = trained_parameters(model)
        self._embedding_tables: set[Tensor] = large_embeddings(model) if self.device.type == "cpu" else set()
        self._sent: Tensor | None = None
        if records_steps and world_size() > 1:  # one tensor for all recordings, which would each keep their own
            numbers = sum(parameter.numel() for parameter in self.parameters.values())
            self._sent = torch.empty(numbers, device=self.device)
        self._batches = 0
        updates, moments = (0, None) if restored is None else (restored.updates, restored.moments)
        self.optimizer = FusedAdamW(self.parameters, training, updates, moments)
        self.optimizer.keeps_norm |= self._sent is not None  # which workers compare before they record

    def forward(self, inputs: object) -> Any:
        with arithmetic(decided(self._training.precision), self.device):
            return self.model(inputs)

    def backward(self, share: Tensor) -> None:
        (share / self._training.gradient_accumulation).backward()

    def step(self, lr: float | Tensor) -> None:
        self._batches += 1
        if self._batches % self._training.gradient_accumulation:
            return
        all_reduce_gradients(self.parameters.values(), self._embedding_tables, self._sent)
        self.optimizer.step(lr)
        self.optimizer.zero_grad()

    def state(self) -> dict[tuple[str, str], Tensor]:
        """Return all tensors that a step changes, by kind and name: weights, moments, and the number of updates."""
        entries = {
            (kind, name): tensor.detach() for kind, name, tensor in entries_of(self.model, self.optimizer.moments)
        }
        return {**entries, ("updates", ""): self.optimizer.updates}

    def snapshot(self) -> Snapshot | None:
        if rank() > 0:  # all ranks have the same state
            return None
        entries = entries_of(self.model, self.optimizer.moments)
        return take_snapshot(entries, self.optimizer.updates, self.device)

    def close(self) -> None:
        self.optimizer.zero_grad()


def large_embeddings(model: nn.Module) -> set[Tensor]:
    """Return the weights of embedding tables that have many more rows than a batch touches."""
    return {
        part.weight
        for part in model.modules()
        if isinstance(part, nn.Embedding) and part.num_embeddings >= MIN_TABLE_ROWS
    }


def all_reduce_gradients(
    parameters: Iterable[nn.Parameter], tables: Set[Tensor] = frozenset(), buffer: Tensor | None = None
) -> None:
    """Sum gradients over all workers in place, with one all-reduce.

    Of an embedding table's gradient, only rows that are nonzero on a worker are sent, about 5 % of the rows. These tables are
    most of a small student. Finding the rows synchronizes with the device, so pass tables on CPUs only. `buffer` has room for
    all gradients, which are sent in it; default: a new tensor.
    """
    if world_size() == 1:
        return
    gradients = [(p in tables, p.grad) for p in parameters if p.grad is not None]
    dense = [gradient for is_table, gradient in gradients if not is_table]
    by_rows = [gradient for is_table, gradient in gradients if is_table]
    row_ids = _union_over_workers([(table.amax(dim=1) != 0) | (table.amin(dim=1) != 0) for table in by_rows])
    sent = [*dense, *(table[ids] for table, ids in zip(by_rows, row_ids, strict=True))]
    sizes = [part.numel() for part in sent]
    joined = torch.cat([part.flatten() for part in sent], out=None if buffer is None else buffer[: sum(sizes)])
    summed = all_reduce_sum(joined).split(sizes)
    totals = [total.view_as(part) for part, total in zip(sent, summed, strict=True)]
    for gradient, total in zip(dense, totals, strict=False):
        gradient.copy_(total)
    for table, ids, total in zip(by_rows, row_ids, totals[len(dense) :], strict=True):
        table.index_copy_(0, ids, total)


def _union_over_workers(masks: Sequence[Tensor]) -> list[Tensor]:
    """Return, for each table, the ids of the rows that any worker's (n,) boolean mask selects."""
    if not masks:
        return []
    counts = all_reduce_sum(torch.cat(list(masks)).int())
    return [part.nonzero()[:, 0] for part in counts.split([len(mask) for mask in masks])]
