"""The engine without DeepSpeed: same interface, same numerical results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcse.devices.device import arithmetic, default_device, defaults_of
from distcse.devices.distributed import all_reduce_sum, rank, world_size
from distcse.recipe import LoopSection, decided
from distcse.training.checkpoint_files import ModelState
from distcse.training.engines.fused_adamw import FusedAdamW, trained_parameters
from distcse.training.snapshot import Snapshot, SnapshotTaker, entries_of

BUCKET_BYTES = 25 * 2**20
"""Size at which a bucket is sent: PyTorch's DistributedDataParallel uses the same."""


class GradientBuckets:
    """Starts the all-reduce of a bucket of gradients as soon as the backward pass has computed them.

    Workers must compute gradients of the same parameters.

    Args:
        parameters: The trained parameters, in the order of the forward pass.
        bucket_bytes: Size at which a bucket is sent. Default: 25 MiB.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        self._fill(list(reversed(parameters)))  # the backward pass computes the last parameters' gradients first
        self._missing: list[int] = []
        self.sent: list[tuple[list[nn.Parameter], Tensor, Any]] = []
        self._is_reducing = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _fill(self, parameters: list[nn.Parameter]) -> None:
        """Put the parameters into buckets, in this order."""
        self._parameters = parameters
        self.buckets = _split(parameters, self._bucket_bytes)
        self._bucket_of = {parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket}

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Context manager: send the gradients that the backward pass inside completes. Call `finish` afterwards."""
        self._missing, self._is_reducing = [len(bucket) for bucket in self.buckets], True
        try:
            yield
        finally:
            self._is_reducing = False

    def finish(self) -> None:
        """Send the buckets that contain a parameter without gradient, and replace all gradients by their sums.

        Such parameters then go to the last buckets: buckets are sent in order, and wait for the earlier ones.
        """
        while len(self.sent) < len(self.buckets):
            self._send()
        for parameters, gradients, work in self.sent:
            if work is not None:
                work.wait()  # with NCCL, the GPU waits and not the host
            sizes = [parameter.numel() for parameter in parameters]
            for parameter, gradient in zip(parameters, gradients.split(sizes), strict=True):
                parameter.grad = gradient.view_as(parameter)
        self.sent.clear()
        unused = {parameter for parameter in self._parameters if parameter.grad is None}
        if unused != set(self._parameters[len(self._parameters) - len(unused) :]):
            self._fill(sorted(self._parameters, key=unused.__contains__))

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self._is_reducing:
            return
        self._missing[self._bucket_of[parameter]] -= 1
        # Only in the buckets' order: all workers must start the collectives in one order.
        while len(self.sent) < len(self.buckets) and not self._missing[len(self.sent)]:
            self._send()

    def _send(self) -> None:
        parameters = [parameter for parameter in self.buckets[len(self.sent)] if parameter.grad is not None]
        gradients = [parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]
        bucket = torch.cat(gradients) if gradients else torch.empty(0)
        self.sent.append((parameters, bucket, dist.all_reduce(bucket, async_op=True) if gradients else None))


def _split(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Split parameters into consecutive buckets."""
    buckets: list[list[nn.Parameter]] = []
    size = bucket_bytes
    for parameter in parameters:
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets


MIN_TABLE_ROWS = 4096
"""Smallest embedding table whose gradient is sent by rows: a batch touches few of its rows."""


class TorchEngine:
    """Trains with plain PyTorch: AdamW, clipping, gradient accumulation, and gradients summed over the workers.

    On GPUs they are summed in buckets during the backward pass; on CPUs, and where steps are recorded as CUDA graphs, at its
    end, in one all-reduce.
    """

    def __init__(
        self, model: nn.Module, training: LoopSection, restored: ModelState | None, records_steps: bool = False
    ) -> None:
        self.device = torch.device(default_device())
        self.model = model.to(self.device)
        self._training = training
        self.parameters = trained_parameters(model)
        self._embedding_tables: set[Tensor] = large_embeddings(model) if self.device.type == "cpu" else set()
        overlaps = world_size() > 1 and defaults_of(self.device).overlaps_reduction and not records_steps
        self._buckets = GradientBuckets(list(self.parameters.values())) if overlaps else None
        self._sent: Tensor | None = None
        if world_size() > 1 and records_steps:  # one tensor for all recordings, which would each keep their own
            numbers = sum(parameter.numel() for parameter in self.parameters.values())
            self._sent = torch.empty(numbers, device=self.device)
        self._batches = 0
        updates, moments = (0, None) if restored is None else (restored.updates, restored.moments)
        self.optimizer = FusedAdamW(self.parameters, training, updates, moments)
        self.snapshots = SnapshotTaker(self.device)

    def forward(self, inputs: object) -> Any:
        with arithmetic(decided(self._training.precision), self.device):
            return self.model(inputs)

    def backward(self, share: Tensor) -> None:
        accumulation = self._training.gradient_accumulation
        is_update = (self._batches + 1) % accumulation == 0
        with self._buckets.reducing() if self._buckets is not None and is_update else nullcontext():
            (share / accumulation).backward()

    def step(self, lr: float | Tensor) -> None:
        self._batches += 1
        if self._batches % self._training.gradient_accumulation:
            return
        if self._buckets is not None:
            self._buckets.finish()
        else:
            all_reduce_gradients(self.parameters.values(), self._embedding_tables, self._sent)
        self.optimizer.step(lr)
        self.optimizer.zero_grad()

    def snapshot(self) -> Snapshot | None:
        if rank() > 0:  # all ranks have the same state
            return None
        return self.snapshots.take(entries_of(self.model, self.optimizer.moments), self.optimizer.updates)

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
    most of a small student. Finding the rows synchronizes with the device, so pass tables on CPUs only.

    Args:
        parameters: Parameters whose gradients are summed.
        tables: Those of them that are embedding tables to send by rows. Default: none.
        buffer: (n,) tensor of the gradients' type that they are sent in, with room for all. Default: a new one.
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
