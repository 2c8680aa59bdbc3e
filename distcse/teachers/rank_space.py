"""Rank space (Seonwoo et al. 2023): a sentence is the order in which it sees n reference sentences.

Two sentences are alike as far as they order the references alike: the inner product of their unit rank vectors, which is
Spearman's correlation of their similarities to the references (RankEncoder Eq. 3 and 4).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from distcse.teachers.table import EmbeddingTable

_BYTES = 256 * 2**20
"""Held at a time beside the references: similarities, order and ranks of a chunk of rows."""
_BYTES_A_CELL = 4 + 8 + 4


def rank_vectors(similarities: NDArray[np.floating]) -> NDArray[np.float32]:
    """(m, n) similarities to n references -> (m, n) unit rank vectors g (Eq. 3), ascending ranks, ties by place.

    One sort a row: ranks are written through its order. A permutation's mean and norm are constants, so nothing is reduced.
    """
    rows, references = similarities.shape
    scale = math.sqrt(12 / (references * (references**2 - 1)))
    places = ((np.arange(references) - (references - 1) / 2) * scale).astype(np.float32)
    ranks = np.empty((rows, references), dtype=np.float32)
    np.put_along_axis(ranks, np.argsort(similarities, axis=1), places[None, :], axis=1)
    return ranks


class RankSpace:
    """n reference vectors, and the rank vectors of others among them.

    Args:
        references: (n, d) unit vectors, n ≥ 2.
    """

    def __init__(self, references: NDArray[np.float32]) -> None:
        if len(references) < 2:
            raise ValueError(f"{len(references)} references; an order needs two")
        self._references = references

    def ranks(self, vectors: NDArray[np.floating]) -> NDArray[np.float32]:
        """(m, d) unit vectors -> (m, n) unit rank vectors, a chunk of rows at a time."""
        ranks = np.empty((len(vectors), len(self._references)), dtype=np.float32)
        step = max(1, _BYTES // (_BYTES_A_CELL * len(self._references)))
        for begin in range(0, len(vectors), step):
            chunk = slice(begin, begin + step)
            ranks[chunk] = rank_vectors(np.asarray(vectors[chunk], dtype=np.float32) @ self._references.T)
        return ranks

    def similarities(self, vectors: NDArray[np.floating]) -> NDArray[np.float32]:
        """(m, d) unit vectors -> (m, m) Spearman correlations of their similarities to the references."""
        return inner_products(self.ranks(vectors))


def inner_products(ranks: NDArray[np.float32], others: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """(m, n) and (k, n) unit rank vectors -> (m, k) similarities in [-1, 1], summed in float64 over chunks of references."""
    others = ranks if others is None else others
    total = np.zeros((len(ranks), len(others)))
    step = max(1, _BYTES // (8 * (len(ranks) + len(others))))
    for begin in range(0, ranks.shape[1], step):
        chunk = slice(begin, begin + step)
        total += ranks[:, chunk].astype(np.float64) @ others[:, chunk].T.astype(np.float64)
    return np.asarray(np.clip(total, -1.0, 1.0), dtype=np.float32)


class RankSpaceTeacher:
    """Serves rank-space similarities of a table's rows, the references being rows of the same table.

    Args:
        table: Unit vectors of the corpus.
        references: Row ids of the reference sentences.
    """

    def __init__(self, table: EmbeddingTable, references: NDArray[np.int64]) -> None:
        self._table = table
        self._space = RankSpace(table.vectors(references))

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """(B, C) row ids of B steps' batches -> (B, R, C) rank-space similarities in [-1, 1]."""
        answers = []
        for batch in columns:
            ranks = self._space.ranks(self._table.vectors(batch))
            answers.append(inner_products(ranks[rows], ranks))
        return np.stack(answers)
