"""InfoNCE: classify each sentence's second view among all second views of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distcse.losses.views import TeacherOutputs, Views


def info_nce(similarities: Tensor, tau1: float, offset: int = 0) -> Tensor:
    """Compute -log softmax(S_i / τ1) at the positive, column `offset + i` (SimCSE Eq. 1; RankCSE §4.2, Eq. 1).

    In one direction, from z1 to z2, with in-batch negatives.

    Args:
        similarities: (R, C) cosines of the student.
        tau1: Temperature.
        offset: Column of the first row's positive. Default: 0.

    Returns:
        (R,) losses.
    """
    rows = len(similarities)
    positives = torch.arange(offset, offset + rows, device=similarities.device)
    losses: Tensor = _InfoNCE.apply(similarities, positives[:, None], tau1)
    return losses


class _InfoNCE(torch.autograd.Function):
    """InfoNCE with a closed-form gradient, (P - 1 at the positive) / τ1, which saves one matrix and allocates one."""

    @staticmethod
    def forward(ctx: Any, similarities: Tensor, positives: Tensor, tau1: float) -> Tensor:
        log_p = (similarities / tau1).log_softmax(dim=1)
        losses = log_p.gather(1, positives)[:, 0].neg_()
        ctx.tau1 = tau1
        ctx.save_for_backward(log_p.exp_(), positives)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        probabilities, positives = ctx.saved_tensors
        scale = gradients[0][:, None] / ctx.tau1
        return (scale * probabilities).scatter_add_(1, positives, -scale), None, None


class InfoNCE(nn.Module):
    """InfoNCE term of an objective.

    Args:
        tau1: Temperature.
    """

    def __init__(self, tau1: float) -> None:
        super().__init__()
        self.tau1 = tau1

    def forward(self, views: Views, teachers: TeacherOutputs | None = None) -> Tensor:
        """Return this worker's share of the loss."""
        return info_nce(views.similarities, self.tau1, views.offset).sum() / views.columns
