"""Recall of the one right document for each query."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def recall_at(
    queries: NDArray[np.floating], documents: NDArray[np.floating], cutoffs: Sequence[int]
) -> dict[int, float]:
    """Share of queries, times 100, whose own document is among the k nearest by cosine, for each k.

    Args:
        queries: (n, d) unit vectors; row i's document is `documents[i]`.
        documents: (n, d) unit vectors.
        cutoffs: Values of k.

    A document as near as the right one counts as nearer: ties do not help.
    """
    cosines = queries @ documents.T
    right = np.diagonal(cosines)[:, None]
    nearer = (cosines >= right).sum(axis=1) - 1
    return {k: float(100 * np.mean(nearer < k)) for k in cutoffs}
