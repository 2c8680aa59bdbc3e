"""Rank space (Seonwoo et al. 2023): a sentence is the order in which it sees n reference sentences.

Two sentences are alike as far as they order the references alike: the inner product of their unit rank vectors, which is
Spearman's correlation of their similarities to the references (RankEncoder Eq. 3 and 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_BYTES = 256 * 2**20
"""Held at a time beside the references, of rank vectors in float64."""
_SIMILARITIES = 32 * 2**20
"""Held at a time, of similarities: a chunk of rows, some of which the caches still have when they are ordered."""
BINS = 2**16
LOST = 1e-11
"""Most that t / n of a row may be (see `counted_rank_vectors`)."""


def rank_vectors(similarities: NDArray[np.floating], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """(m, n) similarities to n references -> (m, n) unit rank vectors g (Eq. 3), ascending ranks, ties by place; into `out`.

    One order a row: ranks are written through it. A permutation's mean and norm are constants, so nothing is reduced.
    """
    rows, references = similarities.shape
    places = ((np.arange(references) - (references - 1) / 2) * unit_scale(references)).astype(np.float32)
    ranks = np.empty((rows, references), dtype=np.float32) if out is None else out
    for order, found in zip(_orders(similarities), ranks, strict=True):
        found[order] = places
    return ranks


def unit_scale(n: int) -> float:
    """What n centred ranks are multiplied by for length 1."""
    return math.sqrt(12 / (n * (n**2 - 1)))


def _orders(similarities: NDArray[np.floating]) -> Iterator[NDArray[np.integer]]:
    """Of each row the places of its numbers, ascending, equal ones as they come; each is written over by the next one.

    Floats are ordered as their bits are, once those of the negative ones are turned round. With the places below them they are
    whole numbers, which numpy sorts where they lie by vector instructions: 100,000 in half the time of its argsort.
    """
    if similarities.dtype != np.float32:
        yield from (np.argsort(row, kind="stable") for row in similarities)
        return
    references = similarities.shape[1]
    places, keys = np.arange(references), np.empty(references, np.int64)
    numbers, turned = np.empty(references, np.float32), np.empty(references, np.int32)
    bits = numbers.view(np.int32)
    for row in similarities:
        np.add(row, np.float32(0), out=numbers)  # no -0, which equals 0
        np.right_shift(bits, 31, out=turned)
        turned &= 0x7FFFFFFF
        bits ^= turned
        keys[:] = bits
        keys <<= 32
        keys |= places
        keys.sort()
        keys &= 0xFFFFFFFF
        yield keys


def counted_rank_vectors(
    similarities: NDArray[np.floating], out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """The same without a sort: a row's similarities are counted into 65,536 bins, and a bin's references share its mean rank.

    What that leaves out of a row's rank vector g is e, orthogonal to all that bins can tell, of squared length t = Σ (c³ - c) /
    (n³ - n) over the bins' counts c. A similarity is off by e · g', about √(t / n); a row where that is more than 3e-6 (few
    references, or many as good as equal) is sorted. Among 100,000 references similarities are off by 1e-6.
    """
    ranks = np.empty(similarities.shape, dtype=np.float32) if out is None else out
    n = similarities.shape[1]
    half = unit_scale(n) / 2
    scaled, whole, bins = np.empty(n, np.float32), np.empty(n, np.int32), np.empty(n, np.intp)
    for row, found in zip(similarities, ranks, strict=True):
        low, high = row.min(), row.max()
        if not low < high:
            rank_vectors(row[None], found[None])
            continue
        np.subtract(row, low, out=scaled)
        scaled *= np.float32((BINS - 1) / (high - low))
        np.copyto(whole, scaled, casting="unsafe")  # by way of 32 bits, which vector instructions can
        np.copyto(bins, whole)
        counts = np.bincount(bins, minlength=BINS)
        full = counts.astype(np.float64)
        lost = full @ (full * full) - n
        if lost > LOST * n * (n**3 - n):
            rank_vectors(row[None], found[None])
            continue
        twice = np.cumsum(counts)  # of a bin's mean rank
        twice *= 2
        twice -= counts
        twice -= n
        np.take((twice * half).astype(np.float32), bins, out=found)
    return ranks


RANKS: dict[str, Callable[[NDArray[np.floating], NDArray[np.float32] | None], NDArray[np.float32]]] = {
    "sort": rank_vectors,
    "histogram": counted_rank_vectors,
}
"""By the recipe's names."""


Products = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""(m, d) vectors -> (m, n) inner products with n references."""


class Ranker(Protocol):
    """What orders n references as sentences see them."""

    def __len__(self) -> int: ...

    def ranks(self, vectors: NDArray[np.floating], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """(m, d) unit vectors -> (m, n) unit rank vectors; into `out` where it is given."""
        ...

    def similarities(self, vectors: NDArray[np.floating], rows: slice = ...) -> NDArray[np.float32]:
        """(m, d) unit vectors -> (R, m) Spearman correlations of their similarities to the references."""
        ...


class RankSpace:
    """n reference vectors, and the rank vectors of others among them.

    Args:
        references: (n, d) unit vectors, n ≥ 2; of another length they weigh in the order, as in the public code's inference.
        ranks: `sort`, exact; or `histogram`, faster among tens of thousands and off by 1e-5 at most.
        products: What makes of (m, d) vectors their (m, n) similarities to the references, where something is faster at that
            than NumPy.
    """

    def __init__(self, references: NDArray[np.float32], ranks: str = "sort", products: Products | None = None) -> None:
        self._count = len(enough(references))
        self._products = products or (lambda vectors: vectors @ references.T)
        self._rank_vectors = RANKS[ranks]

    def __len__(self) -> int:
        return self._count

    def ranks(self, vectors: NDArray[np.floating], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """(m, d) unit vectors -> (m, n) unit rank vectors, a chunk of rows at a time; into `out` where it is given."""
        ranks = np.empty((len(vectors), len(self)), dtype=np.float32) if out is None else out
        step = max(1, _SIMILARITIES // (4 * len(self)))
        for begin in range(0, len(vectors), step):
            chunk = slice(begin, begin + step)
            self._rank_vectors(self._products(np.asarray(vectors[chunk], dtype=np.float32)), ranks[chunk])
        return ranks

    def similarities(self, vectors: NDArray[np.floating], rows: slice = slice(None)) -> NDArray[np.float32]:
        """(m, d) unit vectors -> (R, m) Spearman correlations of their similarities to the references."""
        ranks = self.ranks(vectors)
        return inner_products(ranks[rows], ranks)


def enough(references: NDArray[np.float32]) -> NDArray[np.float32]:
    """Those references; `ValueError` where there are not two."""
    if len(references) < 2:
        raise ValueError(f"{len(references)} references; an order needs two")
    return references


def inner_products(ranks: NDArray[np.float32], others: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """(m, n) and (k, n) unit rank vectors -> (m, k) similarities in [-1, 1], summed in float64 over chunks of references."""
    others = ranks if others is None else others
    total = np.zeros((len(ranks), len(others)))
    step = max(1, _BYTES // (8 * (len(ranks) + len(others))))
    for begin in range(0, ranks.shape[1], step):
        chunk = slice(begin, begin + step)
        total += ranks[:, chunk].astype(np.float64) @ others[:, chunk].T.astype(np.float64)
    return np.asarray(np.clip(total, -1.0, 1.0), dtype=np.float32)
