"""Consistency: a divergence between the similarity lists of a sentence's two views (RankCSE Eq. 2)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from distcse.losses.views import TeacherOutputs, Views


def jensen_shannon(logits: Tensor, other: Tensor) -> Tensor:
    """Compute the (R,) Jensen-Shannon divergences, in nats, of both views' (R, C) logits (RankCSE Eq. 2), the positive included.

    Exact, from log-probabilities: log M = log ½ + logaddexp(log P, log Q). Value and gradient are 0 where P = Q.
    """
    divergences: Tensor = _JensenShannon.apply(logits, other)
    return divergences


class _JensenShannon(torch.autograd.Function):
    """Jensen-Shannon divergence with a closed-form gradient, which saves only two matrices for backward.

    The gradient with respect to P's logits is ½ P (log P - log M - KL(P|M)), and likewise for Q.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, other: Tensor) -> Tensor:
        log_p, log_q = logits.log_softmax(dim=1), other.log_softmax(dim=1)
        log_m = torch.logaddexp(log_p, log_q).add_(math.log(0.5))
        (kl_p, grad_p), (kl_q, grad_q) = _divergence(log_p, log_m), _divergence(log_q, log_m)
        ctx.save_for_backward(grad_p, grad_q)
        return kl_p.add_(kl_q).mul_(0.5)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        half = 0.5 * gradients[0][:, None]
        grad_p, grad_q = ctx.saved_tensors
        return half * grad_p, half * grad_q


def negative_entropy(logits: Tensor, other: Tensor) -> Tensor:
    """Compute (R,) values -(H(P) + H(Q)) / 2, which RankCSE's public code computes in place of the Jensen-Shannon divergence.

    That code clamps log M to 1e-7, which leaves a confidence penalty that pushes both lists toward uniform.
    """
    log_p, log_q = logits.log_softmax(dim=1), other.log_softmax(dim=1)
    return 0.5 * ((log_p.exp() * log_p).sum(dim=1) + (log_q.exp() * log_q).sum(dim=1))


def _divergence(log_p: Tensor, log_m: Tensor) -> tuple[Tensor, Tensor]:
    """Return (R,) KL(P|M), and twice the (R, C) gradient of the Jensen-Shannon divergence with respect to P's logits."""
    p, log_ratio = log_p.exp(), log_p - log_m
    divergences = torch.einsum("rc,rc->r", p, log_ratio)
    return divergences, p.mul_(log_ratio.sub_(divergences[:, None]))


class Consistency(nn.Module):
    """Consistency term of an objective.

    Args:
        tau1: Temperature of both views' lists.
        form: `js` (default), or `neg_entropy` for the public code's loss.
    """

    def __init__(self, tau1: float, form: str = "js") -> None:
        super().__init__()
        self.tau1 = tau1
        self._divergence = {"js": jensen_shannon, "neg_entropy": negative_entropy}[form]

    def forward(self, views: Views, teachers: TeacherOutputs | None = None) -> Tensor:
        """Return this worker's share of the loss."""
        divergences = self._divergence(views.similarities / self.tau1, views.reverse / self.tau1)
        return divergences.sum() / views.columns
