"""Nearest neighbours among unit vectors, by faiss."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.errors import MissingDependencyError

FLAT_UP_TO = 200_000
"""Vectors up to which the search is exact."""
_LISTS_PROBED = 32


def knn(vectors: NDArray[np.float32], neighbours: int, asked_by: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(n, d) unit vectors -> (n, k + 1) cosines and row ids of the nearest, the row itself among them.

    Exact in up to 200,000 vectors, by an inverted file above; -1 where that finds fewer.

    Args:
        vectors: What is searched, and searched for.
        neighbours: k.
        asked_by: The knob that wants them, for the error.

    Raises:
        RunError: faiss is not installed.
    """
    faiss = require_faiss(asked_by)
    count, width = vectors.shape
    if count <= FLAT_UP_TO:
        index: Any = faiss.IndexFlatIP(width)
    else:
        lists = int(4 * np.sqrt(count))
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, lists, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors[:: max(1, count // (64 * lists))])
        index.nprobe = _LISTS_PROBED
    index.add(vectors)
    cosines, rows = index.search(vectors, min(neighbours + 1, count))
    return cosines, rows


def require_faiss(asked_by: str) -> Any:
    """The library; `RunError` names what wants it where it is not installed."""
    try:
        import faiss
    except ImportError:
        raise MissingDependencyError(f'{asked_by} needs faiss; pip install "distcse[mining]"') from None
    return faiss
