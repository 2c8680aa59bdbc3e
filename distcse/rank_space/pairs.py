"""Pairs of sentences by their ranks: each sentence ranked once, and its rank vector kept while pairs of it are to come."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from distcse.rank_space.space import Ranker

_BYTES = 256 * 2**20
"""Rank vectors that are made at a time, and the similarities that they are made of."""
_INSIDE = 2**30
"""Rank vectors that are kept in memory; more lie in a file."""
_TERMS = 4096
"""Of an inner product that are summed in float32."""


def pair_similarities(
    space: Ranker, vectors: NDArray[np.floating], first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.float64]:
    """(p,) Spearman correlations of p pairs of rows of (m, d) unit vectors; each row is ranked once.

    Rows that are paired are ranked soon after one another, so that few are kept at a time: of STS-B's sentences about a hundred,
    of 0.4 MB each among 100,000 references. Kept ones that would take more than a gibibyte lie in a temporary file.
    """
    if not len(first):
        return np.empty(0)
    order = _partners_together(len(vectors), first, second)
    place = np.argsort(order)
    early, late = np.sort(np.stack([place[first], place[second]]), axis=0)
    wanted_until = np.arange(len(vectors))
    np.maximum.at(wanted_until, early, late)
    by_late = np.argsort(late, kind="stable")
    found = np.empty(len(first), dtype=np.float64)
    step = max(1, _BYTES // (8 * len(space)))
    bounds = range(step, len(vectors), step)
    most = max((int(np.count_nonzero(wanted_until[:bound] >= bound)) for bound in bounds), default=0)
    with _room(most, len(space)) as room:
        free, kept = list(range(most)), dict[int, int]()
        for begin in range(0, len(vectors), step):
            end = min(begin + step, len(vectors))
            ranks = space.ranks(vectors[order[begin:end]])
            for pair in by_late[slice(*np.searchsorted(late, (begin, end), sorter=by_late))]:
                one = int(early[pair])
                other = ranks[one - begin] if one >= begin else room[kept[one]]
                found[pair] = _product(ranks[late[pair] - begin], other)
            free += [kept.pop(row) for row in list(kept) if wanted_until[row] < end]
            for row in (begin + np.flatnonzero(wanted_until[begin:end] >= end)).tolist():
                kept[row] = free.pop()
                room[kept[row]] = ranks[row - begin]
    return np.clip(found, -1.0, 1.0)


def _partners_together(rows: int, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.intp]:
    """An order of all rows in which the two of a pair are near to each other."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    ends = np.concatenate([first, second]), np.concatenate([second, first])
    paired = coo_array((np.ones(len(ends[0]), dtype=np.bool_), ends), shape=(rows, rows)).tocsr()
    return np.asarray(reverse_cuthill_mckee(paired, symmetric_mode=True), dtype=np.intp)


def _product(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Inner product, some thousand terms at a time in float32 and those sums in float64: off by 1e-8 at most."""
    whole = len(one) // _TERMS * _TERMS
    parts = np.vecdot(one[:whole].reshape(-1, _TERMS), other[:whole].reshape(-1, _TERMS))
    return float(parts.sum(dtype=np.float64)) + float(one[whole:] @ other[whole:])


@contextmanager
def _room(rows: int, references: int) -> Iterator[NDArray[np.float32]]:
    if 4 * rows * references <= _INSIDE:
        yield np.empty((rows, references), dtype=np.float32)
        return
    with tempfile.TemporaryFile() as file:
        yield np.memmap(file, dtype=np.float32, mode="w+", shape=(rows, references))
