"""Nearest-neighbor search among unit vectors with faiss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.errors import MissingDependencyError
from distcse.host import pip_install

FLAT_UP_TO = 200_000
"""Largest number of vectors for which the search is exact."""
NUM_PROBES = 32
"""Lists of the inverted file that each query searches."""
_CLUSTERING_PASSES = 10
"""Passes of k-means that find the lists, as faiss makes by default for an inverted file."""
QUERIES = 8192
"""Vectors that are searched for together."""


def knn(
    vectors: NDArray[np.float32],
    num_neighbors: int,
    requested_by: str,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Find the k nearest neighbors of each vector, in addition to the vector itself.

    The search is exact for up to 200,000 vectors, and uses faiss's inverted-file index (`IndexIVFFlat`) for more.

    Args:
        vectors: (n, d) unit vectors.
        num_neighbors: k.
        requested_by: The recipe key that needs the search, for the error message.
        on_progress: Called with the number of vectors searched for so far; with 0 while the index is built.

    Returns:
        (n, min(k + 1, n)) cosines and (n, min(k + 1, n)) row ids, nearest first; an id is -1 where the index finds fewer.

    Raises:
        MissingDependencyError: faiss is not installed.
    """
    faiss, report = require_faiss(requested_by), on_progress or (lambda done: None)
    report(0)
    count, width = vectors.shape
    index: Any = faiss.IndexFlatIP(width)
    if count > FLAT_UP_TO:
        lists = int(4 * np.sqrt(count))
        clusters = faiss.Clustering(width, lists)
        clusters.niter, clusters.spherical = 1, True
        for _ in range(_CLUSTERING_PASSES):
            clusters.train(vectors[:: max(1, count // (64 * lists))], index)  # continues from the previous centroids
            report(0)
        index = faiss.IndexIVFFlat(index, width, lists, faiss.METRIC_INNER_PRODUCT)
        index.is_trained, index.nprobe = True, NUM_PROBES
    for begin in range(0, count, QUERIES):
        index.add(vectors[begin : begin + QUERIES])
        report(0)
    found = []
    for begin in range(0, count, QUERIES):
        report(begin)
        found.append(index.search(vectors[begin : begin + QUERIES], min(num_neighbors + 1, count)))
    cosines, rows = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return cosines, rows


def require_faiss(requested_by: str) -> Any:
    """Import faiss.

    Raises:
        MissingDependencyError: faiss is not installed. The message names `requested_by`.
    """
    try:
        import faiss
    except ImportError:
        raise MissingDependencyError(f"{requested_by} needs faiss; {pip_install('mining')}") from None
    return faiss
