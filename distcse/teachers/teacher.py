"""Teachers: they return the similarities of corpus rows, from a table or by running their encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from distcse.errors import RefusedTextError
from distcse.teachers.table import EmbeddingTable, normalize_rows

if TYPE_CHECKING:
    from distcse.data import Corpus


class Teacher(Protocol):
    """Interface of a teacher: similarity lists for row ids."""

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """Return the similarity lists of B steps.

        Args:
            columns: (B, C) row ids of B steps' global batches.
            rows: Slice of a batch that selects R rows: one worker's share.

        Returns:
            (B, R, C) float32 similarities in [-1, 1] of each selected row to all rows of its batch.
        """
        ...


class Embedder(Protocol):
    """Interface of an encoder, as embedding needs it."""

    def encode(
        self,
        texts: Sequence[str],
        *,
        batch_tokens: int | None = ...,
        normalize: bool | None = ...,
        precision: str = ...,
        on_progress: Callable[[int], None] | None = ...,
    ) -> NDArray[np.float32]:
        """Embed n texts; return (n, d) float32 vectors."""
        ...


class TableTeacher:
    """Serves cosines from an embedding table: one gather and one small matrix product per step."""

    def __init__(self, table: EmbeddingTable) -> None:
        self._table = table

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        steps, length = columns.shape
        vectors = self._table.vectors(columns.ravel()).reshape(steps, length, -1)
        return cosines(vectors, rows)


class LiveTeacher:
    """Serves cosines by running the frozen encoder for every list, for a corpus that is read only once.

    Args:
        encoder: The encoder.
        corpus: The corpus whose row ids are requested.
        precision: Precision of the forward pass.
        tokens_per_batch: Maximum number of tokens in a forward pass; None for the default of the device.
    """

    def __init__(self, encoder: Embedder, corpus: Corpus, precision: str, tokens_per_batch: int | None) -> None:
        self._encoder = encoder
        self._corpus = corpus
        self._precision = precision
        self._tokens_per_batch = tokens_per_batch

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        steps, length = columns.shape
        unique, indices = np.unique(columns.ravel(), return_inverse=True)
        with naming_rows(unique):
            encoded = self._encoder.encode(
                self._corpus.texts(unique),
                batch_tokens=self._tokens_per_batch,
                precision=self._precision,
                normalize=False,
            )
        return cosines(normalize_rows(encoded, unique)[indices].reshape(steps, length, -1), rows)


@contextmanager
def naming_rows(rows: Sequence[int] | NDArray[np.int64]) -> Iterator[None]:
    """Context manager: an error of one of the texts of these rows names its row."""
    try:
        yield
    except RefusedTextError as error:
        if error.index is not None:
            error.place = f"corpus row {rows[error.index]}"
        raise


def cosines(vectors: NDArray[np.float32], rows: slice) -> NDArray[np.float32]:
    """Return the (B, R, C) inner products of (B, C, d) unit vectors, clipped to [-1, 1] against rounding."""
    products: NDArray[np.float32] = np.matmul(vectors[:, rows], vectors.transpose(0, 2, 1))
    np.clip(products, -1.0, 1.0, out=products)
    return products
