"""ListNet: the student's top-one distribution over a list shall match its teachers'."""

from __future__ import annotations

from torch import Tensor, nn

from distcse.losses.similarity_lists import drop_positive
from distcse.losses.teacher_outputs import TeacherOutputs
from distcse.losses.views import Views


def list_net(
    similarities: Tensor,
    lists: Tensor,
    tau2: float,
    tau3: float,
    *,
    exclude_positive: bool = True,
    offset: int = 0,
    trust: Tensor | None = None,
) -> Tensor:
    """(R, L) cosines of student and teachers -> (R,) cross-entropies (RankCSE Eq. 4, footnote 1).

    -Σ_j softmax(ST_i / τ3)_j · log softmax(S_i / τ2)_j. The teachers' entropy is not subtracted: the gradient is
    that of the Kullback-Leibler divergence. With `trust`, (R, L) weights w, it is Σ_j w_j (q_j - p_j - p_j log q_j): each
    pair's own divergence, so that the teachers' list stays the minimum whatever the weights, and 1 everywhere changes nothing.
    """
    if exclude_positive:
        similarities, lists = drop_positive(similarities, offset), drop_positive(lists, offset)
        trust = None if trust is None else drop_positive(trust, offset)
    target = (lists.to(similarities.dtype) / tau3).softmax(dim=1)
    found = (similarities / tau2).log_softmax(dim=1)
    if trust is None:
        return -(target * found).sum(dim=1)
    return (trust * (found.exp() - target - target * found)).sum(dim=1)


class ListNet(nn.Module):
    """The term in an objective."""

    def __init__(self, tau2: float, tau3: float, exclude_positive: bool = True) -> None:
        super().__init__()
        self.tau2 = tau2
        self.tau3 = tau3
        self.exclude_positive = exclude_positive

    def forward(self, views: Views, taught: TeacherOutputs) -> Tensor:
        """This worker's share."""
        assert taught.similarities is not None
        losses = list_net(
            views.extended_similarities,
            views.mask_duplicates(taught.similarities),
            self.tau2,
            self.tau3,
            exclude_positive=self.exclude_positive,
            offset=views.offset,
            trust=taught.pair_weights,
        )
        return losses.sum() / views.columns
