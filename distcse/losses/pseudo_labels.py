"""Losses on pseudo-labels, with which a bi-encoder and a cross-encoder train each other (Trans-Encoder, Liu et al. 2022)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from distcse.losses.views import unit


def mse_cosine(first: Tensor, second: Tensor, labels: Tensor) -> Tensor:
    """Compute the squared errors of a bi-encoder's cosines against a cross-encoder's scores (§2.3).

    The cosine with a zero vector is 0, without gradient. torch's `cosine_similarity` would give a zero vector 10⁸ times the
    others' gradient, which clipping would then reduce to nothing.

    Args:
        first: (B, d) vectors of the pairs' first sentences.
        second: (B, d) vectors of the second sentences.
        labels: (B,) scores.

    Returns:
        (B,) losses.
    """
    cosines = (unit(first.float()) * unit(second.float())).sum(dim=1)
    return (cosines - labels).square()


def bce_soft(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the binary cross-entropies of a cross-encoder's logits against a bi-encoder's cosines (§2.2).

    Args:
        logits: (B,) logits.
        labels: (B,) raw cosines; negative ones are not clipped, as in the public code.

    Returns:
        (B,) losses.
    """
    return binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
