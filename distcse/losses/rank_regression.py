"""Rank regression: regress the student's cosines onto rank-space similarities within a range (RankEncoder)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distcse.devices.distributed import all_reduce_sum
from distcse.losses.views import TeacherOutputs, Views

_EPS = 1e-8
"""Added to the number of kept pairs, as in the public code, so that the loss is 0 without a pair."""


def kept_pairs(lists: Tensor, lower: float, upper: float) -> Tensor:
    """Return an (R, C) mask of the similarities in [lower, upper]."""
    return (lists >= lower) & (lists <= upper)


def squared_errors(similarities: Tensor, lists: Tensor, lower: float, upper: float) -> Tensor:
    """Compute (R,) sums Σ_j m_j (S_ij - R_ij)² of (R, C) cosines S and rank-space similarities R (RankEncoder Eq. 6).

    m selects the kept pairs, of similarities R from τ_l to τ_u.
    """
    kept = kept_pairs(lists, lower, upper)
    return torch.where(kept, similarities - lists.to(similarities.dtype), 0.0).square().sum(dim=1)


class RankRegression(nn.Module):
    """Rank regression term of an objective: the mean squared error over the kept pairs of the global batch.

    Args:
        lower: Smallest similarity of a kept pair.
        upper: Largest similarity of a kept pair.
        same_view: Whether to use the student's cosines of z1 and z1, instead of z1 and z2. Default: False.
    """

    def __init__(self, lower: float, upper: float, same_view: bool = False) -> None:
        super().__init__()
        self.lower = lower
        self.upper = upper
        self.same_view = same_view

    def forward(self, views: Views, teachers: TeacherOutputs) -> Tensor:
        """Return this worker's share: the errors of its rows, divided by the number of kept pairs of all workers."""
        assert teachers.similarities is not None
        lists = teachers.similarities
        similarities = views.same if self.same_view else views.similarities
        pairs = all_reduce_sum(kept_pairs(lists, self.lower, self.upper).sum().to(similarities.dtype))
        return squared_errors(similarities, lists, self.lower, self.upper).sum() / (pairs + _EPS)
