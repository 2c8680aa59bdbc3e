"""ListNet: the student's top-one distribution over a list shall match its teachers'."""

from __future__ import annotations

from torch import Tensor, nn

from distcse.objectives.lists import without_positive
from distcse.objectives.views import Views


def list_net(
    similarities: Tensor, lists: Tensor, tau2: float, tau3: float, *, exclude_positive: bool = True, offset: int = 0
) -> Tensor:
    """(R, C) cosines of student and teachers -> (R,) cross-entropies (RankCSE Eq. 4, footnote 1).

    -Σ_j softmax(ST_i / τ3)_j · log softmax(S_i / τ2)_j. The teachers' entropy is not subtracted: the gradient is
    that of the Kullback-Leibler divergence.
    """
    if exclude_positive:
        similarities, lists = without_positive(similarities, offset), without_positive(lists, offset)
    target = (lists.to(similarities.dtype) / tau3).softmax(dim=1)
    return -(target * (similarities / tau2).log_softmax(dim=1)).sum(dim=1)


class ListNet(nn.Module):
    """The term in an objective."""

    def __init__(self, tau2: float, tau3: float, exclude_positive: bool = True) -> None:
        super().__init__()
        self.tau2 = tau2
        self.tau3 = tau3
        self.exclude_positive = exclude_positive

    def forward(self, views: Views, lists: Tensor) -> Tensor:
        """This worker's share."""
        losses = list_net(
            views.similarities,
            lists,
            self.tau2,
            self.tau3,
            exclude_positive=self.exclude_positive,
            offset=views.offset,
        )
        return losses.sum() / views.columns
