"""What a loss is computed from: two views of each sentence, here and in the global batch, and the teachers' outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from distcse.compat.torch import assert_async
from distcse.devices.device import to_device
from distcse.devices.distributed import all_gather_parts, all_reduce_max, all_reduce_sum, rank, world_size

_MIN_NORM = 1e-12
"""Norm below which a vector is zero."""


@dataclass(frozen=True)
class Detection:
    """The discriminator's sums over this worker's tokens.

    Attributes:
        loss: Sum of the tokens' cross-entropies.
        counts: (5,) tokens the mean is over; edited tokens, those of them found; kept tokens, those of them recognized.
    """

    loss: Tensor
    counts: Tensor

    def __add__(self, other: Detection) -> Detection:
        return Detection(self.loss + other.loss, self.counts + other.counts)

    def shares(self) -> tuple[Tensor, dict[str, Tensor]]:
        """This worker's share of the mean loss, and of the accuracies on edited and kept tokens, in [0, 1]."""
        total = all_reduce_sum(self.counts.clone())
        positions, edited, _, kept, _ = total.clamp(min=1).unbind()
        share = self.loss / positions
        return share, {"edited_accuracy": self.counts[2] / edited, "kept_accuracy": self.counts[4] / kept}


@dataclass(frozen=True)
class Views:
    """The views of a global batch on one worker.

    Attributes:
        z1: (R, d) first views of this worker's rows.
        z2: (R, d) second views of the same rows.
        all_z1: (C, d) first views of the global batch.
        all_z2: (C, d) second views of the global batch.
        offset: Index of this worker's first row in the global batch. Default: 0.
        detection: The discriminator's sums over both views of this worker's rows. Default: none, without a discriminator.
    """

    z1: Tensor
    z2: Tensor
    all_z1: Tensor
    all_z2: Tensor
    offset: int = 0
    detection: Detection | None = None

    @property
    def rows(self) -> int:
        """R, number of this worker's rows."""
        return len(self.z1)

    @property
    def columns(self) -> int:
        """C, number of sentences in the global batch."""
        return len(self.all_z1)

    @cached_property
    def similarities(self) -> Tensor:
        """S, the (R, C) cosines of z1_i and z2_j, in float32 (float64 for float64 views)."""
        return _cosines(self.z1, self.all_z2)

    @cached_property
    def same(self) -> Tensor:
        """(R, C) cosines of z1_i and z1_j; dtype as `similarities`."""
        return _cosines(self.z1, self.all_z1)

    @cached_property
    def reverse(self) -> Tensor:
        """(R, C) cosines of z2_i and z1_j, this worker's rows of the transposed S; dtype as `similarities`."""
        if self.all_z1 is self.z1 and self.all_z2 is self.z2:  # a single worker
            return self.similarities.T
        return _cosines(self.z2, self.all_z1)


@dataclass(frozen=True)
class TeacherOutputs:
    """The teachers' outputs for this worker's R rows.

    Attributes:
        similarities: (R, C) weighted mean similarities to the C sentences of the global batch; see `mix_lists`.
        targets: (R, d) unit vectors, the targets of the student's vectors.
        scores: (G, K) scores of the K candidates of this worker's G queries; its rows are queries, each before its candidates.
    """

    similarities: Tensor | None = None
    targets: Tensor | None = None
    scores: Tensor | None = None

    def to(self, device: torch.device) -> TeacherOutputs:
        """Copy to a device."""
        parts = (self.similarities, self.targets, self.scores)
        return TeacherOutputs(*(part if part is None else to_device(part, device) for part in parts))


def gather_views(z1: Tensor, z2: Tensor, detection: Detection | None = None) -> Views:
    """Gather the views of the global batch from all workers, differentiably.

    Half-precision views are gathered as float32, because the backward pass sums the gradients of all workers, and bf16
    would round each sum. Without a process group, or with one worker, the worker's views are the global batch.

    Args:
        z1: (R, d) first views of this worker's rows.
        z2: (R, d) second views.
        detection: This worker's sums of the discriminator (see `Views`). Default: none.

    Raises:
        ValueError: The two views differ in shape, or workers have different numbers of rows (on a GPU: an asynchronous
            device assertion).
    """
    if z1.shape != z2.shape:
        raise ValueError(f"z1 has shape {tuple(z1.shape)}, but z2 has {tuple(z2.shape)}; pass views of the same rows")
    z1, z2 = _widen(z1), _widen(z2)
    if world_size() == 1:
        return Views(z1, z2, z1, z2, 0, detection)
    _require_equal_rows(len(z1), z1.device)
    all_z1, all_z2 = gather_rows(torch.stack([z1, z2], dim=1)).unbind(dim=1)
    return Views(z1, z2, all_z1, all_z2, rank() * len(z1), detection)


class _GatherRows(torch.autograd.Function):
    """Gathers all workers' rows; backward sums the gradients of every worker's loss with respect to this worker's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.rows = len(rows)
        return torch.cat(all_gather_parts(rows))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # Cloned, because all_reduce works in place, and autograd owns the incoming gradient.
        total = all_reduce_sum(gradient.clone(memory_format=torch.contiguous_format))
        first = rank() * ctx.rows
        return total[first : first + ctx.rows]


gather_rows: Callable[[Tensor], Tensor] = _GatherRows.apply


def _require_equal_rows(rows: int, device: torch.device) -> None:
    extremes = torch.full((2,), rows, device=device)  # not a copy of the host's, which a recorded step could not make
    extremes[1].neg_()
    all_reduce_max(extremes)
    if device.type != "cpu":  # asserted on the device, so that the host does not wait
        assert_async(
            extremes.sum() == 0, "workers have different numbers of rows; pass equal parts of the global batch"
        )
        return
    largest, smallest = int(extremes[0]), -int(extremes[1])
    if largest != smallest:
        raise ValueError(f"workers have between {smallest} and {largest} rows; pass equal parts of the global batch")


def _cosines(left: Tensor, right: Tensor) -> Tensor:
    # Normalize, then multiply: a broadcast cosine, as in the reference code, needs R·C·d values and 131 times the time.
    # Autocast is off, because it would round the product to bf16.
    with torch.autocast(left.device.type, enabled=False):
        return unit(_widen(left)) @ unit(_widen(right)).T


def unit(vectors: Tensor) -> Tensor:
    """Normalize the rows of an (n, d) matrix; a zero row stays zero, without gradient.

    torch's `normalize` divides a zero row by 1e-12. Its gradient would be 1e12 times the others', which clipping would then
    reduce to nothing.
    """
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    is_zero = norms < _MIN_NORM
    return torch.where(is_zero, 0.0, vectors / torch.where(is_zero, 1.0, norms))


def _widen(tensor: Tensor) -> Tensor:
    """Convert half precision to float32, because temperatures multiply rounding errors by 20 to 80."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def mix_lists(lists: Tensor, weights: Sequence[float]) -> Tensor:
    """Compute the weighted mean of T teachers' raw similarities, before any temperature (RankCSE §4.4).

    Args:
        lists: (T, R, C) similarities of T teachers: cosines, or rank-space similarities or cross-encoders' scores.
        weights: T weights, which are normalized to sum 1.

    Returns:
        (R, C) similarities in float32, or float64 for float64 lists.
    """
    if len(weights) != len(lists):
        raise ValueError(f"{len(lists)} lists but {len(weights)} weights; pass one weight per teacher")
    fractions = torch.as_tensor(weights, dtype=torch.float64)
    fractions = (fractions / fractions.sum(dim=0)).to(lists.dtype if lists.dtype == torch.float64 else torch.float32)
    fractions = to_device(fractions, lists.device)
    # Not a matrix product: autocast and TF32 round it, and rounded similarities tie or swap in a teacher's order.
    return (fractions[:, None, None] * lists.to(fractions.dtype)).sum(dim=0)
