"""Combination of the groups' scores into the labels that all groups train on (Trans-Encoder §2.4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distcse.recipe import MutualSection


def combine(
    scores: Sequence[NDArray[np.floating]], weights: Sequence[float], section: MutualSection, cosines: bool
) -> NDArray[np.float32]:
    """Combine the (n,) scores of G groups into (n,) labels.

    Args:
        scores: One array per group: raw cosines of bi-encoders or sigmoid outputs of cross-encoders, not logits.
        weights: Weights of the groups in the mean; their scale does not matter.
        section: How to combine the scores, and whether to clamp cosines to [0, 1].
        cosines: Whether the scores are cosines.
    """
    table = np.stack(scores).astype(np.float64)
    if section.combine == "median":
        labels = np.median(table, axis=0)
    elif section.combine == "trimmed_mean":
        trimmed = _num_trimmed(len(table), section.trim)
        labels = np.sort(table, axis=0)[trimmed : len(table) - trimmed].mean(axis=0)
    else:
        labels = np.average(table, axis=0, weights=weights)
    return (labels.clip(0, 1) if cosines and section.clamp else labels).astype(np.float32)


def _num_trimmed(groups: int, trim: float) -> int:
    """Return how many scores to drop at either end: the share `trim`, but at least 1 of 3 or more groups."""
    return max(int(groups * trim), 1 if groups >= 3 and trim > 0 else 0)
