"""ListNet: match the student's top-one distribution over a list to the teachers' (Cao et al. 2007; RankCSE)."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from distcse.losses.list_loss import ListLoss
from distcse.losses.similarity_lists import drop_positive


def list_net(
    similarities: Tensor,
    lists: Tensor,
    tau2: float,
    tau3: float,
    *,
    exclude_positive: bool = True,
    offset: int = 0,
) -> Tensor:
    """Compute ListNet's cross-entropies, -Σ_j p_j log q_j (RankCSE Eq. 4, footnote 1).

    p = softmax(lists_i / τ3) and q = softmax(similarities_i / τ2). The constant entropy of p is not subtracted, so that the
    gradient is that of the Kullback-Leibler divergence.

    Args:
        similarities: (R, C) cosines of the student.
        lists: (R, C) similarities of the teachers.
        tau2: The student's temperature.
        tau3: The teachers' temperature.
        exclude_positive: Whether to drop column `offset + i` of row i. Default: True.
        offset: Column of the first row's positive. Default: 0.

    Returns:
        (R,) losses.
    """
    if exclude_positive:
        similarities, lists = drop_positive(similarities, offset), drop_positive(lists, offset)
    p = (lists.to(similarities.dtype) / tau3).softmax(dim=1)
    log_q = (similarities / tau2).log_softmax(dim=1)
    return -(p * log_q).sum(dim=1)


class ListNet(ListLoss):
    """ListNet term of an objective; arguments as for `list_net`."""

    def __init__(self, tau2: float, tau3: float, exclude_positive: bool = True) -> None:
        super().__init__(partial(list_net, tau2=tau2, tau3=tau3, exclude_positive=exclude_positive))
