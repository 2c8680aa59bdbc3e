"""InfoNCE: each sentence's second view is the one right answer among the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distcse.losses.teacher_outputs import TeacherOutputs
from distcse.losses.views import Views


def info_nce(similarities: Tensor, tau1: float, offset: int = 0, softened: Tensor | None = None) -> Tensor:
    """(R, C) cosines -> (R,) losses: -log softmax(S_i / τ1) at the positive, column `offset + i`.

    One direction, z1 to z2, cosine, in-batch negatives (SimCSE Eq. 1; RankCSE §4.2, Eq. 1).

    Args:
        similarities: The student's cosines.
        tau1: Temperature.
        offset: Place of the first row in the global batch.
        softened: (R, C) weights in [0, 1] of the negatives' terms in the softmax (`negative_weights`), 1 at the positives;
            None weighs all 1.
    """
    rows = len(similarities)
    positives = torch.arange(offset, offset + rows, device=similarities.device)
    found: Tensor = _InfoNCE.apply(similarities, positives[:, None], tau1, softened)
    return found


class _InfoNCE(torch.autograd.Function):
    """With its gradient in closed form, (P - 1 at the positive) / τ1; it keeps one matrix, and makes one on the way back."""

    @staticmethod
    def forward(ctx: Any, similarities: Tensor, positives: Tensor, tau1: float, softened: Tensor | None) -> Tensor:
        logits = similarities / tau1
        if softened is not None:
            logits += softened.to(logits.dtype).log()  # of 0: minus infinity, no term at all
        log_p = logits.log_softmax(dim=1)
        losses = log_p.gather(1, positives)[:, 0].neg_()
        ctx.tau1 = tau1
        ctx.save_for_backward(log_p.exp_(), positives)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        shares, positives = ctx.saved_tensors
        each = gradients[0][:, None] / ctx.tau1
        return (each * shares).scatter_add_(1, positives, -each), None, None, None


def negative_weights(lists: Tensor, above: float, form: str, offset: int = 0) -> Tensor:
    """(R, C) similarities of the teachers -> (R, C) weights of InfoNCE's negatives: who is no negative counts less.

    Args:
        lists: The teachers' similarities.
        above: Pairs at least this similar are held to say the same.
        form: `mask` leaves them out; `soften` lets their weight fall from 1 at `above` to 0 at similarity 1.
        offset: Place of the first row: the positives keep weight 1.
    """
    same = lists >= above
    left = torch.zeros_like(lists) if form == "mask" else ((1 - lists) / (1 - above)).clamp(0, 1)
    weights = torch.where(same, left, 1.0)
    weights.diagonal(offset).fill_(1.0)
    return weights


class InfoNCE(nn.Module):
    """The term in an objective; with `above`, negatives that the teachers call alike are masked or softened."""

    def __init__(self, tau1: float, above: float | None = None, form: str = "mask") -> None:
        super().__init__()
        self.tau1 = tau1
        self.above = above
        self.form = form

    def forward(self, views: Views, taught: TeacherOutputs | None = None) -> Tensor:
        """This worker's share."""
        softened = None
        if self.above is not None:
            assert taught is not None and taught.similarities is not None
            similar = taught.similarities if taught.clean_similarities is None else taught.clean_similarities
            softened = negative_weights(similar[:, : views.columns], self.above, self.form, views.offset)
        return info_nce(views.similarities, self.tau1, views.offset, softened).sum() / views.columns
