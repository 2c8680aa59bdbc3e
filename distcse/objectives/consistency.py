"""Consistency: the two views of a sentence shall see the same list."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from distcse.objectives.taught import Taught
from distcse.objectives.views import Views


def jensen_shannon(logits: Tensor, other: Tensor) -> Tensor:
    """(R, C) logits of two views -> (R,) Jensen-Shannon divergences in nats (RankCSE Eq. 2), positive included.

    Exact, from log-probabilities: M = log ½ + logaddexp(log P, log Q). 0 where P = Q, with gradient 0.
    """
    log_p, log_q = logits.log_softmax(dim=1), other.log_softmax(dim=1)
    log_m = math.log(0.5) + torch.logaddexp(log_p, log_q)
    return 0.5 * (_divergence(log_p, log_m) + _divergence(log_q, log_m))


def negative_entropy(logits: Tensor, other: Tensor) -> Tensor:
    """(R, C) logits of two views -> (R,) values of -(H(P) + H(Q)) / 2: what the public RankCSE code computes as 'JS'.

    It clamps log M to 1e-7, which leaves a confidence penalty that pushes both lists towards the uniform one.
    """
    log_p, log_q = logits.log_softmax(dim=1), other.log_softmax(dim=1)
    return 0.5 * ((log_p.exp() * log_p).sum(dim=1) + (log_q.exp() * log_q).sum(dim=1))


def _divergence(log_p: Tensor, log_m: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_m)).sum(dim=1)


class Consistency(nn.Module):
    """The term in an objective; `form` is `js` or `neg_entropy`."""

    def __init__(self, tau1: float, form: str = "js") -> None:
        super().__init__()
        self.tau1 = tau1
        self._divergence = {"js": jensen_shannon, "neg_entropy": negative_entropy}[form]

    def forward(self, views: Views, taught: Taught | None = None) -> Tensor:
        """This worker's share."""
        divergences = self._divergence(views.similarities / self.tau1, views.reverse / self.tau1)
        return divergences.sum() / views.columns
