"""Similarities of pairs in rank space: each sentence is ranked once, and its rank vector is kept until its last pair."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from distcse.rank_space.space import Ranker

BLOCK_BYTES = 256 * 2**20
"""Memory for a chunk of rank vectors, and the similarities they are computed from."""
MAX_MEMORY_BYTES = 2**30
"""Largest size of the kept rank vectors in memory; larger ones are in a temporary file."""
_FLOAT32_TERMS = 4096
"""Number of terms of an inner product that are summed in float32."""


def pair_similarities(
    space: Ranker, vectors: NDArray[np.floating], first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Compute the Spearman correlations of p pairs of sentences.

    Each sentence is ranked once. Paired sentences are ranked close together, so that few rank vectors are kept at once:
    about a hundred for STS-B, 0.4 MB each with 100,000 references. More than 1 GiB of them are kept in a temporary file.

    Args:
        space: The rank space.
        vectors: (m, d) unit vectors of the sentences.
        first: (p,) row index of each pair's first sentence.
        second: (p,) row index of each pair's second sentence.

    Returns:
        (p,) correlations in [-1, 1].
    """
    if not len(first):
        return np.empty(0)
    order = _order_by_pairs(len(vectors), first, second)
    position = np.argsort(order)
    earlier, later = np.sort(np.stack([position[first], position[second]]), axis=0)
    needed_until = np.arange(len(vectors))
    np.maximum.at(needed_until, earlier, later)
    by_later = np.argsort(later, kind="stable")
    similarities = np.empty(len(first), dtype=np.float64)
    step = max(1, BLOCK_BYTES // (8 * len(space)))
    bounds = range(step, len(vectors), step)
    max_kept = max((int(np.count_nonzero(needed_until[:bound] >= bound)) for bound in bounds), default=0)
    with _buffer(max_kept, len(space)) as buffer:
        free_slots, slots = list(range(max_kept)), dict[int, int]()
        for begin in range(0, len(vectors), step):
            end = min(begin + step, len(vectors))
            ranks = space.ranks(vectors[order[begin:end]])
            for pair in by_later[slice(*np.searchsorted(later, (begin, end), sorter=by_later))]:
                row = int(earlier[pair])
                other = ranks[row - begin] if row >= begin else buffer[slots[row]]
                similarities[pair] = _product(ranks[later[pair] - begin], other)
            free_slots += [slots.pop(row) for row in list(slots) if needed_until[row] < end]
            for row in (begin + np.flatnonzero(needed_until[begin:end] >= end)).tolist():
                slots[row] = free_slots.pop()
                buffer[slots[row]] = ranks[row - begin]
    return np.clip(similarities, -1.0, 1.0)


def _order_by_pairs(rows: int, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return an order of all rows in which paired rows are close (reverse Cuthill-McKee)."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    ends = np.concatenate([first, second]), np.concatenate([second, first])
    paired = coo_array((np.ones(len(ends[0]), dtype=np.bool_), ends), shape=(rows, rows)).tocsr()
    return np.asarray(reverse_cuthill_mckee(paired, symmetric_mode=True), dtype=np.intp)


def _product(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Compute an inner product, in float32 within blocks and in float64 over blocks; the error is at most 1e-8."""
    blocked = len(one) // _FLOAT32_TERMS * _FLOAT32_TERMS
    parts = np.vecdot(one[:blocked].reshape(-1, _FLOAT32_TERMS), other[:blocked].reshape(-1, _FLOAT32_TERMS))
    return float(parts.sum(dtype=np.float64)) + float(one[blocked:] @ other[blocked:])


@contextmanager
def _buffer(rows: int, references: int) -> Iterator[NDArray[np.float32]]:
    if 4 * rows * references <= MAX_MEMORY_BYTES:
        yield np.empty((rows, references), dtype=np.float32)
        return
    with tempfile.TemporaryFile() as file:
        yield np.memmap(file, dtype=np.float32, mode="w+", shape=(rows, references))
