"""Losses on pseudo-labels, with which a bi-encoder and a cross-encoder train each other (Trans-Encoder, Liu et al. 2022)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from distcse.losses.views import unit


def mse_cosine(first: Tensor, second: Tensor, labels: Tensor) -> Tensor:
    """Compute the (B,) squared errors of the cosines of (B, d) vectors against a cross-encoder's (B,) scores (§2.3).

    The cosine with a zero vector is 0, without gradient. torch's `cosine_similarity` would give a zero vector 10⁸ times the
    others' gradient, which clipping would then reduce to nothing.
    """
    cosines = (unit(first.float()) * unit(second.float())).sum(dim=1)
    return (cosines - labels).square()


def bce_soft(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the (B,) binary cross-entropies of a cross-encoder's (B,) logits against a bi-encoder's raw cosines (§2.2).

    Negative cosines are not clipped, as in the public code.
    """
    return binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
