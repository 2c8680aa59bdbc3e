"""Consistency: the two views of a sentence shall see the same list."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from distcse.losses.teacher_outputs import TeacherOutputs
from distcse.losses.views import Views


def jensen_shannon(logits: Tensor, other: Tensor) -> Tensor:
    """(R, C) logits of two views -> (R,) Jensen-Shannon divergences in nats (RankCSE Eq. 2), positive included.

    Exact, from log-probabilities: log M = log ½ + logaddexp(log P, log Q). 0 where P = Q, with gradient 0.
    """
    found: Tensor = _JensenShannon.apply(logits, other)
    return found


class _JensenShannon(torch.autograd.Function):
    """With its gradient in closed form, ½ P (log P - log M - KL(P|M)) to P's logits, and Q's likewise; it keeps two matrices."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, other: Tensor) -> Tensor:
        log_p, log_q = logits.log_softmax(dim=1), other.log_softmax(dim=1)
        log_m = torch.logaddexp(log_p, log_q).add_(math.log(0.5))
        (of_p, to_p), (of_q, to_q) = _divergence(log_p, log_m), _divergence(log_q, log_m)
        ctx.save_for_backward(to_p, to_q)
        return of_p.add_(of_q).mul_(0.5)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        half = 0.5 * gradients[0][:, None]
        to_p, to_q = ctx.saved_tensors
        return half * to_p, half * to_q


def negative_entropy(logits: Tensor, other: Tensor) -> Tensor:
    """(R, C) logits of two views -> (R,) values of -(H(P) + H(Q)) / 2: what the public RankCSE code computes as 'JS'.

    It clamps log M to 1e-7, which leaves a confidence penalty that pushes both lists towards the uniform one.
    """
    log_p, log_q = logits.log_softmax(dim=1), other.log_softmax(dim=1)
    return 0.5 * ((log_p.exp() * log_p).sum(dim=1) + (log_q.exp() * log_q).sum(dim=1))


def _divergence(log_p: Tensor, log_m: Tensor) -> tuple[Tensor, Tensor]:
    """(R,) KL(P|M), and (R, C) twice the gradient of the Jensen-Shannon divergence to P's logits."""
    shares, apart = log_p.exp(), log_p - log_m
    divergences = torch.einsum("rc,rc->r", shares, apart)
    return divergences, shares.mul_(apart.sub_(divergences[:, None]))


class Consistency(nn.Module):
    """The term in an objective; `form` is `js` or `neg_entropy`."""

    def __init__(self, tau1: float, form: str = "js") -> None:
        super().__init__()
        self.tau1 = tau1
        self._divergence = {"js": jensen_shannon, "neg_entropy": negative_entropy}[form]

    def forward(self, views: Views, taught: TeacherOutputs | None = None) -> Tensor:
        """This worker's share."""
        divergences = self._divergence(views.similarities / self.tau1, views.reverse / self.tau1)
        return divergences.sum() / views.columns
