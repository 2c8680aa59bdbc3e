"""Does the student order sentences as its teachers do? The dev score where nothing is labelled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata


def agreement(student: NDArray[np.floating], lists: NDArray[np.floating]) -> float:
    """Mean Spearman correlation, times 100, between the student's and the teachers' similarity lists.

    Args:
        student: (n, d) unit vectors of n sentences.
        lists: (n, n) cosines of the teachers for the same sentences.

    Each sentence's list is its row without itself; n ≥ 3. A constant list has no order and counts as 0.
    """
    others = ~np.eye(len(lists), dtype=bool)
    ours = _centred_ranks((student @ student.T)[others].reshape(len(lists), -1))
    theirs = _centred_ranks(np.asarray(lists)[others].reshape(len(lists), -1))
    scale = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    products = (ours * theirs).sum(axis=1)
    correlations = np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
    return float(100 * correlations.mean())


def _centred_ranks(lists: NDArray[np.floating]) -> NDArray[np.float64]:
    ranks: NDArray[np.float64] = rankdata(lists, axis=1)
    ranks -= ranks.mean(axis=1, keepdims=True)
    return ranks
