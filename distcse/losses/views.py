"""Two views of each sentence, this worker's and everybody's, and the cosines between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distcse.device import to_device

_SHORTEST = 1e-12
"""Length below which a vector counts as zero."""
_OPPOSITE = -1.0
"""The least cosine there is."""


@dataclass(frozen=True)
class Views:
    """The views of one global batch, as one worker sees them.

    Attributes:
        z1: (R, d) first views of this worker's rows.
        z2: (R, d) second views of the same rows.
        all_z1: (C, d) first views of the global batch.
        all_z2: (C, d) second views of the global batch.
        offset: Place of this worker's first row in the global batch.
        queue: (K, d) vectors of sentences beyond the batch that lengthen its lists, without gradient; None has none.
        duplicate_mask: (R, K) whether a sentence in the memory is the row itself.
    """

    z1: Tensor
    z2: Tensor
    all_z1: Tensor
    all_z2: Tensor
    offset: int = 0
    queue: Tensor | None = None
    duplicate_mask: Tensor | None = None

    @property
    def rows(self) -> int:
        """R, sentences of this worker."""
        return len(self.z1)

    @property
    def columns(self) -> int:
        """C, sentences of the global batch."""
        return len(self.all_z1)

    @cached_property
    def similarities(self) -> Tensor:
        """S: (R, C) cosines of z1_i and z2_j, in float32 (float64 for float64 views)."""
        return _cosines(self.z1, self.all_z2)

    @cached_property
    def extended_similarities(self) -> Tensor:
        """(R, C + K): S, and the cosines of z1_i and the memory, those of a sentence met again blanked; S without a memory."""
        if self.queue is None:
            return self.similarities
        return self.mask_duplicates(torch.cat([self.similarities, _cosines(self.z1, self.queue)], dim=1))

    def mask_duplicates(self, matrix: Tensor) -> Tensor:
        """(R, C + K) similarities -> the same, a row's own sentence in the memory as far away as can be.

        Blanked in the student's list and in the teachers' alike, it has next to no weight in either, and no gradient.
        """
        if self.duplicate_mask is None:
            return matrix
        batch, memory = matrix[:, : self.columns], matrix[:, self.columns :]
        return torch.cat([batch, memory.masked_fill(self.duplicate_mask, _OPPOSITE)], dim=1)

    def mask_pair_weights(self, trust: Tensor | None) -> Tensor | None:
        """(R, C + K) weights of the pairs in a list, 0 for a sentence met again; None where all count alike."""
        if self.duplicate_mask is None:
            return trust
        batch = torch.ones_like(self.similarities, requires_grad=False)
        counted = torch.cat([batch, (~self.duplicate_mask).to(batch.dtype)], dim=1)
        return counted if trust is None else counted * trust

    @cached_property
    def same(self) -> Tensor:
        """(R, C) cosines of z1_i and z1_j, in the dtype of `similarities`."""
        return _cosines(self.z1, self.all_z1)

    @cached_property
    def reverse(self) -> Tensor:
        """S': (R, C) cosines of z2_i and z1_j, this worker's rows of the transposed S; dtype as S."""
        if self.all_z1 is self.z1 and self.all_z2 is self.z2:  # one worker's rows are all of them
            return self.similarities.T
        return _cosines(self.z2, self.all_z1)


def gather_views(z1: Tensor, z2: Tensor, memory: Tensor | None = None, duplicate_mask: Tensor | None = None) -> Views:
    """This worker's (R, d) views -> `Views` of the global batch, differentiable through the gather.

    The memory is the same on all workers; see `Views` for it.

    Without a process group, or with one worker, the global batch is the worker's own. Half-precision views become
    float32 before they travel: all workers' gradients are summed on the way back, and bf16 would round each sum.

    Raises:
        ValueError: The two views differ in shape, or workers hold different numbers of rows.
    """
    if z1.shape != z2.shape:
        raise ValueError(f"views of shapes {tuple(z1.shape)} and {tuple(z2.shape)}; both hold the same sentences")
    z1, z2 = _wide(z1), _wide(z2)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Views(z1, z2, z1, z2, queue=memory, duplicate_mask=duplicate_mask)
    _require_equal_rows(len(z1), z1.device)
    all_z1, all_z2 = _gather_rows(torch.stack([z1, z2], dim=1)).unbind(dim=1)
    return Views(z1, z2, all_z1, all_z2, dist.get_rank() * len(z1), memory, duplicate_mask)


class _GatherRows(torch.autograd.Function):
    """All workers' rows; backward adds what every worker's loss says about this worker's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.rows = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # A copy: the sum is taken in place, and the gradient that came in is autograd's.
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        first = dist.get_rank() * ctx.rows
        return total[first : first + ctx.rows]


_gather_rows: Callable[[Tensor], Tensor] = _GatherRows.apply


def _require_equal_rows(rows: int, device: torch.device) -> None:
    extremes = to_device(torch.tensor([rows, -rows]), device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if device.type != "cpu":  # asked there, so that the host need not wait for the answer
        torch._assert_async(
            extremes.sum() == 0, "workers hold different numbers of rows; a global batch wants equal parts"
        )
        return
    largest, smallest = int(extremes[0]), -int(extremes[1])
    if largest != smallest:
        raise ValueError(f"workers hold between {smallest} and {largest} rows; a global batch wants equal parts")


def _cosines(left: Tensor, right: Tensor) -> Tensor:
    # Normalise, then multiply: the references' broadcast cosine holds R·C·d numbers and takes 131 times as long.
    # Autocast would round the product to bf16.
    with torch.autocast(left.device.type, enabled=False):
        return unit(_wide(left)) @ unit(_wide(right)).T


def unit(vectors: Tensor) -> Tensor:
    """(n, d) -> rows of length 1. A zero row stays zero and passes no gradient.

    torch's `normalize` divides a zero row by 1e-12: its gradient, 1e12 times the others', would leave nothing of them
    after clipping.
    """
    lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    zero = lengths < _SHORTEST
    return torch.where(zero, 0.0, vectors / torch.where(zero, 1.0, lengths))


def _wide(tensor: Tensor) -> Tensor:
    """Half-precision views become float32: temperatures multiply their rounding by 20 to 80."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
