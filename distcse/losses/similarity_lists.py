"""Operations on similarity lists: mix teachers, weight pairs by agreement, add rank noise, drop the positive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distcse.device import to_device

_MIN_STD = 1e-6
"""Lower bound of a list's standard deviation, for lists with equal entries."""


def mix_lists(lists: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
    """Compute the weighted mean of the teachers' raw cosines, before any temperature (RankCSE §4.4, for T teachers).

    Args:
        lists: (T, R, C) cosines of T teachers.
        weights: T weights, or (T, R) for weights per row; they are normalized to sum 1 over teachers.

    Returns:
        (R, C) similarities in float32, or float64 for float64 lists.

    Raises:
        ValueError: The numbers of weights and teachers differ.
    """
    if len(weights) != len(lists):
        raise ValueError(f"{len(lists)} lists but {len(weights)} weights; pass one weight per teacher")
    fractions = torch.as_tensor(weights, dtype=torch.float64)
    fractions = (fractions / fractions.sum(dim=0)).to(lists.dtype if lists.dtype == torch.float64 else torch.float32)
    fractions = to_device(fractions, lists.device)
    # Not a matrix product: autocast and TF32 round it, and rounded cosines tie or swap in a teacher's order.
    factors = fractions[:, None, None] if fractions.dim() == 1 else fractions[:, :, None]
    return (factors * lists.to(fractions.dtype)).sum(dim=0)


def disagreement_weights(lists: Tensor, weights: Sequence[float] | Tensor, scale: float) -> Tensor:
    """Compute pair weights exp(-spread / scale) from the teachers' agreement on each pair.

    Each list is first standardized to mean 0 and standard deviation 1, because the ranges of teachers' cosines differ. The
    spread is the weighted standard deviation over teachers. With one teacher, all pair weights are 1.

    Args:
        lists: (T, R, C) cosines of T teachers.
        weights: T weights, or (T, R) for weights per row.
        scale: Spread at which a pair's weight is 1/e.

    Returns:
        (R, C) weights in (0, 1].
    """
    wide = lists.float()
    std, mean = torch.std_mean(wide, dim=2, keepdim=True, correction=0)
    standardized = (wide - mean) / std.clamp(min=_MIN_STD)
    center = mix_lists(standardized, weights)
    return torch.exp(-mix_lists((standardized - center).square(), weights).sqrt() / scale)


def shuffle_rank_groups(lists: Tensor, group: int, seed: int, offset: int, unchanged: Tensor | None = None) -> Tensor:
    """Add rank noise: permute similarities within groups of adjacent ranks (DistillCSE).

    In each row, the sentences other than the row's own, in descending order of similarity, form groups of `group`. Each
    group's similarities are permuted at random, depending only on the seed and the row's index in the global batch.

    Args:
        lists: (R, L) similarities of the teachers.
        group: Number of sentences in a group.
        seed: Seed of the step.
        offset: Index of the first row in the global batch.
        unchanged: (R, L) mask of entries to exclude, such as duplicates of the row's sentence. Default: none.

    Returns:
        (R, L) similarities.
    """
    rows, columns = lists.shape
    drawn = torch.rand(offset + rows, columns, generator=torch.Generator().manual_seed(seed))[offset:]
    own = torch.arange(offset, offset + rows, device=lists.device)[:, None]
    sort_keys = lists if unchanged is None else lists.masked_fill(unchanged, -torch.inf)
    order = sort_keys.scatter(1, own, torch.inf).argsort(dim=1, descending=True, stable=True)  # own sentence has rank 0
    ranks = torch.arange(columns, device=lists.device)
    groups = (ranks - 1).div(group, rounding_mode="floor").expand(rows, -1)
    if unchanged is not None:
        groups = torch.where(ranks >= columns - unchanged.sum(dim=1, keepdim=True), columns + ranks, groups)
    shuffled = (groups + to_device(drawn, lists.device)).argsort(dim=1)
    return torch.empty_like(lists).scatter_(1, order, lists.gather(1, order.gather(1, shuffled)))


def drop_positive(matrix: Tensor, offset: int) -> Tensor:
    """Drop column `offset + i` of row i.

    Gathers by index instead of masking with infinity, so that no 0·∞ occurs in the gradient.

    Args:
        matrix: (R, C) matrix.
        offset: Column of the first row's positive.

    Returns:
        (R, C - 1) matrix.
    """
    rows, columns = matrix.shape
    own = torch.arange(offset, offset + rows, device=matrix.device)[:, None]
    others = torch.arange(columns - 1, device=matrix.device).expand(rows, -1)
    return matrix.gather(1, others + (others >= own))
