"""Rank regression: the student's cosine shall be the teachers' rank-space similarity, where that is neither low nor trivial."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcse.losses.teacher_outputs import TeacherOutputs
from distcse.losses.views import Views

_NO_PAIR = 1e-8
"""Added to the number of kept pairs, as the public code does: without a pair the loss is 0."""


def kept_pairs(lists: Tensor, lower: float, upper: float) -> Tensor:
    """(R, C) similarities -> (R, C) booleans: those within [τl, τu], the ends included."""
    return (lists >= lower) & (lists <= upper)


def squared_errors(similarities: Tensor, lists: Tensor, lower: float, upper: float) -> Tensor:
    """(R, C) cosines of the student and rank-space similarities -> (R,) sums of m · (S - R)² (RankEncoder Eq. 6)."""
    kept = kept_pairs(lists, lower, upper)
    return torch.where(kept, similarities - lists.to(similarities.dtype), 0.0).square().sum(dim=1)


class RankRegression(nn.Module):
    """The term in an objective: the mean squared error over the kept pairs of the global batch."""

    def __init__(self, lower: float, upper: float, same_view: bool = False) -> None:
        super().__init__()
        self.lower = lower
        self.upper = upper
        self.same_view = same_view

    def forward(self, views: Views, taught: TeacherOutputs) -> Tensor:
        """This worker's share: its own rows' errors over the number of pairs of the batch that all workers keep."""
        assert taught.similarities is not None
        lists = taught.similarities[:, : views.columns]
        similarities = views.same if self.same_view else views.similarities
        pairs = kept_pairs(lists, self.lower, self.upper).sum().to(similarities.dtype)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(pairs)
        return squared_errors(similarities, lists, self.lower, self.upper).sum() / (pairs + _NO_PAIR)
