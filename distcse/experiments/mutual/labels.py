"""From the groups' scores to the labels that all of them learn from (Trans-Encoder §2.4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distcse.recipe import MutualSection


def combine(
    scores: Sequence[NDArray[np.floating]], weights: Sequence[float], section: MutualSection, cosines: bool
) -> NDArray[np.float32]:
    """(G, n) scores of G groups -> (n,) labels.

    Args:
        scores: Raw cosines of bi-encoders, or sigmoid outputs of cross-encoders; never logits.
        weights: Of the groups, for the mean; their scale does not matter.
        section: How scores are combined.
        cosines: Whether they are cosines, which may be clamped.
    """
    table = np.stack(scores).astype(np.float64)
    if section.combine == "median":
        labels = np.median(table, axis=0)
    elif section.combine == "trimmed_mean":
        left_out = _left_out(len(table), section.trim)
        labels = np.sort(table, axis=0)[left_out : len(table) - left_out].mean(axis=0)
    else:
        labels = np.average(table, axis=0, weights=weights)
    return (labels.clip(0, 1) if cosines and section.clamp else labels).astype(np.float32)


def _left_out(groups: int, trim: float) -> int:
    """Scores left out at either end: the share, and at least one of three or more."""
    return max(int(groups * trim), 1 if groups >= 3 and trim > 0 else 0)
