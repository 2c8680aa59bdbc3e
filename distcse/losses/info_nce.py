"""InfoNCE: classify each sentence's second view among all second views of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distcse.losses.views import TeacherOutputs, Views


def info_nce(similarities: Tensor, tau1: float, offset: int = 0, weights: Tensor | None = None) -> Tensor:
    """Compute -log softmax(S_i / τ1) at the positive, column `offset + i` (SimCSE Eq. 1; RankCSE §4.2, Eq. 1).

    In one direction, from z1 to z2, with in-batch negatives.

    Args:
        similarities: (R, C) cosines of the student.
        tau1: Temperature.
        offset: Column of the first row's positive. Default: 0.
        weights: (R, C) weights in [0, 1] of the terms in the softmax's denominator, 1 at the positives (see
            `negative_weights`). Default: all 1.

    Returns:
        (R,) losses.
    """
    rows = len(similarities)
    positives = torch.arange(offset, offset + rows, device=similarities.device)
    losses: Tensor = _InfoNCE.apply(similarities, positives[:, None], tau1, weights)
    return losses


class _InfoNCE(torch.autograd.Function):
    """InfoNCE with a closed-form gradient, (P - 1 at the positive) / τ1, which saves one matrix and allocates one."""

    @staticmethod
    def forward(ctx: Any, similarities: Tensor, positives: Tensor, tau1: float, weights: Tensor | None) -> Tensor:
        logits = similarities / tau1
        if weights is not None:
            logits += weights.to(logits.dtype).log()  # weight 0: a logit of minus infinity
        log_p = logits.log_softmax(dim=1)
        losses = log_p.gather(1, positives)[:, 0].neg_()
        ctx.tau1 = tau1
        ctx.save_for_backward(log_p.exp_(), positives)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, positives = ctx.saved_tensors
        scale = gradients[0][:, None] / ctx.tau1
        return (scale * probabilities).scatter_add_(1, positives, -scale), None, None, None


def negative_weights(lists: Tensor, threshold: float, form: str, offset: int = 0) -> Tensor:
    """Compute weights of InfoNCE's negatives that reduce false negatives, pairs that the teachers find similar.

    Args:
        lists: (R, C) similarities of the teachers.
        threshold: Similarity from which a pair is a false negative.
        form: `mask` gives false negatives weight 0; `soften` decreases it linearly from 1 at the threshold to 0 at
            similarity 1.
        offset: Column of the first row's positive, which keeps weight 1. Default: 0.

    Returns:
        (R, C) weights in [0, 1].
    """
    is_false_negative = lists >= threshold
    reduced = torch.zeros_like(lists) if form == "mask" else ((1 - lists) / (1 - threshold)).clamp(0, 1)
    weights = torch.where(is_false_negative, reduced, 1.0)
    weights.diagonal(offset).fill_(1.0)
    return weights


class InfoNCE(nn.Module):
    """InfoNCE term of an objective.

    Args:
        tau1: Temperature.
        threshold: Teacher similarity from which a negative is masked or softened. Default: None, no negative is.
        form: `mask` (default) or `soften` (see `negative_weights`).
    """

    def __init__(self, tau1: float, threshold: float | None = None, form: str = "mask") -> None:
        super().__init__()
        self.tau1 = tau1
        self.threshold = threshold
        self.form = form

    def forward(self, views: Views, teachers: TeacherOutputs | None = None) -> Tensor:
        """Return this worker's share of the loss."""
        weights = None
        if self.threshold is not None:
            assert teachers is not None and teachers.similarities is not None
            weights = negative_weights(teachers.similarities, self.threshold, self.form, views.offset)
        return info_nce(views.similarities, self.tau1, views.offset, weights).sum() / views.columns
