"""ListMLE: the teachers' order shall be likely under the student's Plackett-Luce model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distcse.losses.similarity_lists import drop_positive
from distcse.losses.teacher_outputs import TeacherOutputs
from distcse.losses.views import Views

_IN_DOUBLE = 600.0
"""Largest difference of two logits whose shares, and their inverses, float64 holds. That of two cosines by τ2 is 2 / τ2."""


def list_mle(
    similarities: Tensor,
    lists: Tensor,
    tau2: float,
    *,
    exclude_positive: bool = False,
    list_reduction: str = "sum",
    eps: float | None = None,
    offset: int = 0,
    trust: Tensor | None = None,
) -> Tensor:
    """(R, L) cosines of student and teachers -> (R,) values of -log P(teachers' order | S_i / τ2) (RankCSE Eq. 5).

    Args:
        similarities: The student's cosines.
        lists: The teachers'; only their descending order counts. Ties keep their place in the batch.
        tau2: Temperature.
        exclude_positive: Leave column `offset + i` out of row i.
        list_reduction: `sum` over the list is the likelihood; `mean` divides by the list's length.
        eps: None is exact. 1e-10 (allRank) or 1e-7 (public RankCSE code) is added inside the logarithm, after the row's
            maximum was taken out. It acts like a phantom item at cosine max - τ2·ln(1/eps): items below it are pushed
            up, the positive down.
        offset: Place of the first row in the global batch.
        trust: (R, L) weights: each place of the order counts as much as the sentence there; None counts all alike.
    """
    if exclude_positive:
        similarities, lists = drop_positive(similarities, offset), drop_positive(lists, offset)
        trust = None if trust is None else drop_positive(trust, offset)
    order = lists.argsort(dim=1, descending=True, stable=True)
    logits = (similarities / tau2).gather(1, order)
    if eps is not None:
        places = _suffixes_with_eps(logits, eps)
    elif logits.device.type == "cpu" and logits.shape[1] and 2 / tau2 <= _IN_DOUBLE:
        places = _SuffixesInDouble.apply(logits)
    else:
        places = _exact_suffixes(logits)
    losses = (places if trust is None else places * trust.gather(1, order)).sum(dim=1)
    return losses / max(1, logits.shape[1]) if list_reduction == "mean" else losses


def _exact_suffixes(logits: Tensor) -> Tensor:
    """log Σ_{k ≥ j} exp(l_k) - l_j, stable at any temperature."""
    return logits.flip(1).logcumsumexp(dim=1).flip(1) - logits


class _SuffixesInDouble(torch.autograd.Function):
    """The same for cosines at temperatures that are not tiny: sums of shares exp(l_k - max l) in float64, of which none is 0.

    A sixth of `logcumsumexp`'s time on a CPU, and nearer to the exact value. The gradient of what goes by w_j at place j is
    exp(l_k) Σ_{j ≤ k} w_j / Σ_{i ≥ j} exp(l_i) - w_k.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        highest = logits.amax(dim=1, keepdim=True)
        shares = (logits - highest).double().exp_()
        sums = shares.flip(1).cumsum_(1).flip(1)
        ctx.save_for_backward(shares, sums)
        return (sums.log() + (highest - logits)).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (weights,), (shares, sums) = gradients, ctx.saved_tensors
        before: Tensor = (weights.double() / sums).cumsum_(1)
        return before.mul_(shares).to(weights.dtype).sub_(weights)


def _suffixes_with_eps(logits: Tensor, eps: float) -> Tensor:
    if not logits.shape[1]:
        return logits
    below = logits - logits.max(dim=1, keepdim=True).values
    return torch.log(below.exp().flip(1).cumsum(dim=1).flip(1) + eps) - below


class ListMLE(nn.Module):
    """The term in an objective."""

    def __init__(
        self, tau2: float, exclude_positive: bool = False, list_reduction: str = "sum", eps: float | None = None
    ) -> None:
        super().__init__()
        self.tau2 = tau2
        self.exclude_positive = exclude_positive
        self.list_reduction = list_reduction
        self.eps = eps

    def forward(self, views: Views, taught: TeacherOutputs) -> Tensor:
        """This worker's share."""
        assert taught.similarities is not None
        losses = list_mle(
            views.extended_similarities,
            views.mask_duplicates(taught.similarities),
            self.tau2,
            exclude_positive=self.exclude_positive,
            list_reduction=self.list_reduction,
            eps=self.eps,
            offset=views.offset,
            trust=views.mask_pair_weights(taught.pair_weights),
        )
        return losses.sum() / views.columns
