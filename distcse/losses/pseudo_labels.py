"""Regression onto pseudo-labels: what Trans-Encoder's two formulations learn from each other (Liu et al. 2022, §2.2 and 2.3)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cosine_similarity


def mse_cosine(first: Tensor, second: Tensor, labels: Tensor) -> Tensor:
    """(B, d) vectors of pairs' sentences, (B,) labels -> (B,) squared errors of their cosines; cross → bi."""
    return (cosine_similarity(first.float(), second.float(), dim=1) - labels).square()


def bce_soft(logits: Tensor, labels: Tensor) -> Tensor:
    """(B,) logits and soft labels -> (B,) binary cross-entropies; bi → cross.

    Labels are raw cosines: one below 0 is taken as it is, as the public code does.
    """
    return binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
