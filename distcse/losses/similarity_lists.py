"""Operations on similarity lists: mix teachers, drop the positive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distcse.device import to_device


def mix_lists(lists: Tensor, weights: Sequence[float]) -> Tensor:
    """Compute the weighted mean of the teachers' raw cosines, before any temperature (RankCSE §4.4, for T teachers).

    Args:
        lists: (T, R, C) cosines of T teachers.
        weights: T weights, which are normalized to sum 1.

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
    return (fractions[:, None, None] * lists.to(fractions.dtype)).sum(dim=0)


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
