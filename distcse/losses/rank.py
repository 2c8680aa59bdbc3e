"""Ranking distillation: match the student's similarity lists to the teachers', by ListNet or by ListMLE (RankCSE).

ListNet (Cao et al. 2007) matches the top-one distribution over a list; ListMLE (Xia et al. 2008) maximizes the likelihood of the
teachers' order under the student's Plackett-Luce model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distcse.losses.views import TeacherOutputs, Views

_MAX_LOGIT_RANGE = 600.0
"""Largest difference of two logits whose exponential and its inverse float64 can represent; for cosines it is 2 / τ2."""


class ListLoss(nn.Module):
    """A term of an objective that compares the lists of this worker's rows, over the global batch.

    Args:
        row_losses: Computes the (R,) losses of the rows from the (R, C) cosines of the student and the (R, C) similarities of
            the teachers. Its keyword argument `offset` is the column of the first row's positive.
    """

    def __init__(self, row_losses: Callable[..., Tensor]) -> None:
        super().__init__()
        self._row_losses = row_losses

    def forward(self, views: Views, teachers: TeacherOutputs) -> Tensor:
        """Return this worker's share of the loss."""
        assert teachers.similarities is not None
        losses = self._row_losses(views.similarities, teachers.similarities, offset=views.offset)
        return losses.sum() / views.columns


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


def list_mle(
    similarities: Tensor,
    lists: Tensor,
    tau2: float,
    *,
    exclude_positive: bool = False,
    list_reduction: str = "sum",
    eps: float | None = None,
    offset: int = 0,
) -> Tensor:
    """Compute -log P(teachers' order | S_i / τ2) (RankCSE Eq. 5).

    Args:
        similarities: (R, C) cosines of the student.
        lists: (R, C) similarities of the teachers; only their descending order matters, ties in batch order.
        tau2: Temperature.
        exclude_positive: Whether to drop column `offset + i` of row i. Default: False.
        list_reduction: `sum` (default) over the list, the negative log-likelihood; or `mean`, divided by the list's length.
        eps: Added inside the logarithm, after subtraction of the row's maximum: 1e-10 in allRank, 1e-7 in RankCSE's public
            code. It acts like an additional item at cosine max - τ2·ln(1/eps), which raises items below it and lowers the
            positive. Default: None, exact.
        offset: Column of the first row's positive. Default: 0.

    Returns:
        (R,) losses.
    """
    if exclude_positive:
        similarities, lists = drop_positive(similarities, offset), drop_positive(lists, offset)
    order = lists.argsort(dim=1, descending=True, stable=True)
    logits = (similarities / tau2).gather(1, order)
    if eps is not None:
        terms = _suffix_terms_with_eps(logits, eps)
    elif logits.device.type == "cpu" and logits.shape[1] and 2 / tau2 <= _MAX_LOGIT_RANGE:
        terms = SuffixTermsInDouble.apply(logits)
    else:
        terms = exact_suffix_terms(logits)
    losses = terms.sum(dim=1)
    return losses / max(1, logits.shape[1]) if list_reduction == "mean" else losses


def exact_suffix_terms(logits: Tensor) -> Tensor:
    """Compute log Σ_{k ≥ j} exp(l_k) - l_j at each position j, stable at any temperature."""
    return logits.flip(1).logcumsumexp(dim=1).flip(1) - logits


class SuffixTermsInDouble(torch.autograd.Function):
    """The same in float64, for logits in a range in which no exp(l_k - max l) underflows.

    Six times as fast as `logcumsumexp` on a CPU, and more accurate. For upstream gradients w_j, the gradient with respect to
    l_k is exp(l_k) Σ_{j ≤ k} w_j / Σ_{i ≥ j} exp(l_i) - w_k.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        highest = logits.amax(dim=1, keepdim=True)
        exponentials = (logits - highest).double().exp_()
        sums = exponentials.flip(1).cumsum_(1).flip(1)
        ctx.save_for_backward(exponentials, sums)
        return (sums.log() + (highest - logits)).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (weights,), (exponentials, sums) = gradients, ctx.saved_tensors
        prefix_sums: Tensor = (weights.double() / sums).cumsum_(1)
        return prefix_sums.mul_(exponentials).to(weights.dtype).sub_(weights)


def _suffix_terms_with_eps(logits: Tensor, eps: float) -> Tensor:
    if not logits.shape[1]:
        return logits
    shifted = logits - logits.max(dim=1, keepdim=True).values
    return torch.log(shifted.exp().flip(1).cumsum(dim=1).flip(1) + eps) - shifted


class ListMLE(ListLoss):
    """ListMLE term of an objective; arguments as for `list_mle`."""

    def __init__(
        self, tau2: float, exclude_positive: bool = False, list_reduction: str = "sum", eps: float | None = None
    ) -> None:
        super().__init__(
            partial(list_mle, tau2=tau2, exclude_positive=exclude_positive, list_reduction=list_reduction, eps=eps)
        )


def drop_positive(matrix: Tensor, offset: int) -> Tensor:
    """Drop column `offset + i` of row i of an (R, C) matrix, by index: masks of infinity would give 0·∞ in the gradient."""
    rows, columns = matrix.shape
    own = torch.arange(offset, offset + rows, device=matrix.device)[:, None]
    others = torch.arange(columns - 1, device=matrix.device).expand(rows, -1)
    return matrix.gather(1, others + (others >= own))
