"""Replaced token detection: a discriminator finds the edited tokens of a sentence, given its vector (DiffCSE §3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distcse.devices.device import is_gpu
from distcse.losses.views import Detection, TeacherOutputs, Views


def detection(
    logits: Tensor, labels: Tensor, mask: Tensor, reduction: str = "all", length: Tensor | None = None
) -> Detection:
    """(B, L, 2) logits, (B, L) labels (1 is edited) and mask -> sums.

    Args:
        logits: The discriminator's.
        labels: What is to be found.
        mask: 1 on tokens, 0 on padding.
        reduction: `all` counts padding and [CLS] too, as the public code's mean does, to which its λ is tuned; `nonpad`
            leaves padding out.
        length: Scalar, the positions of each row that `all` counts; None counts all of them.
    """
    losses = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    seen = mask.bool()
    if reduction == "nonpad":
        counted = seen
    elif length is None:
        counted = torch.ones_like(seen)
    else:
        counted = (torch.arange(labels.shape[1], device=labels.device) < length).expand_as(seen)
    loss = losses.sum() if reduction == "all" and length is None else _sum_where(losses, counted)
    with torch.no_grad():
        right = (logits.argmax(dim=2) == labels) & seen
        edited = (labels == 1) & seen
        kept = (labels == 0) & seen
        sums = [edited.sum(), (right & edited).sum(), kept.sum(), (right & kept).sum()]
        counts = torch.stack([counted.sum().float(), *(s.float() for s in sums)])
    return Detection(loss, counts)


def _sum_where(values: Tensor, mask: Tensor) -> Tensor:
    """Sum the values where the mask is True; on a GPU without an index, for whose size the host would wait."""
    return values.where(mask, 0.0).sum() if is_gpu(values.device) else values[mask].sum()


class ReplacedTokenDetection(nn.Module):
    """Replaced token detection term of an objective; the student's model has computed the discriminator's errors."""

    def forward(self, views: Views, teachers: TeacherOutputs | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this worker's share of the loss, and of the accuracies `edited_accuracy` and `kept_accuracy`."""
        assert views.detection is not None
        return views.detection.shares()
