"""InfoNCE: each sentence's second view is the one right answer among the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distcse.objectives.views import Views


def info_nce(similarities: Tensor, tau1: float, offset: int = 0) -> Tensor:
    """(R, C) cosines -> (R,) losses: -log softmax(S_i / τ1) at the positive, column `offset + i`.

    One direction, z1 to z2, cosine, in-batch negatives (SimCSE Eq. 1; RankCSE §4.1).
    """
    rows = len(similarities)
    positives = torch.arange(offset, offset + rows, device=similarities.device)
    return cross_entropy(similarities / tau1, positives, reduction="none")


class InfoNCE(nn.Module):
    """The term in an objective."""

    def __init__(self, tau1: float) -> None:
        super().__init__()
        self.tau1 = tau1

    def forward(self, views: Views, lists: Tensor | None = None) -> Tensor:
        """This worker's share."""
        return info_nce(views.similarities, self.tau1, views.offset).sum() / views.columns
