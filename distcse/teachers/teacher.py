"""A teacher answers one question: how similar are these rows? From a table, or by running its encoder now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from distcse.teachers.table import EmbeddingTable, normalize_rows

if TYPE_CHECKING:
    from distcse.data import Corpus


class Teacher(Protocol):
    """Whatever serves similarity lists for row ids."""

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """(B, C) row ids of B steps' global batches -> (B, R, C) cosines in [-1, 1].

        `rows` picks the R places of each batch whose lists are wanted: one worker's share.
        """
        ...


class Embedder(Protocol):
    """An encoder, or something that answers like one."""

    def encode(
        self,
        texts: Sequence[str],
        *,
        batch_tokens: int = ...,
        normalize: bool | None = ...,
        precision: str = ...,
        on_progress: Callable[[int], None] | None = ...,
    ) -> NDArray[np.float32]:
        """(n,) texts -> (n, d) vectors."""
        ...


class TableTeacher:
    """Serves from an embedding table: a gather and one small matrix product a step."""

    def __init__(self, table: EmbeddingTable) -> None:
        self._table = table

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        steps, length = columns.shape
        vectors = self._table.vectors(columns.ravel()).reshape(steps, length, -1)
        return _cosines(vectors, rows)


class LiveTeacher:
    """Runs the frozen encoder for every list: for text that changes, or a corpus seen once."""

    def __init__(self, encoder: Embedder, corpus: Corpus, precision: str, tokens_per_batch: int) -> None:
        self._encoder = encoder
        self._corpus = corpus
        self._precision = precision
        self._tokens_per_batch = tokens_per_batch

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        steps, length = columns.shape
        unique, places = np.unique(columns.ravel(), return_inverse=True)
        encoded = self._encoder.encode(
            self._corpus.texts(unique),
            batch_tokens=self._tokens_per_batch,
            precision=self._precision,
            normalize=False,
        )
        return _cosines(normalize_rows(encoded, unique)[places].reshape(steps, length, -1), rows)


def _cosines(vectors: NDArray[np.float32], rows: slice) -> NDArray[np.float32]:
    """(B, C, d) unit vectors -> (B, R, C) inner products, rounding kept out of [-1, 1]."""
    products: NDArray[np.float32] = np.matmul(vectors[:, rows], vectors.transpose(0, 2, 1))
    np.clip(products, -1.0, 1.0, out=products)
    return products
