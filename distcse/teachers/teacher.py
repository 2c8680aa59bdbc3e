"""Teachers: they return the similarities of corpus rows, from a table or by running their encoder.

PyTorch is imported only for rank-space similarities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from distcse.errors import RefusedTextError, TeacherOutputError
from distcse.recipe import Role, TeacherSection, TeachersSection
from distcse.teachers.table import EmbeddingTable, normalize_rows

if TYPE_CHECKING:
    from distcse.text import Corpus


class Teacher(Protocol):
    """Interface of a teacher: similarity lists for row ids."""

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """Return the similarity lists of B steps.

        Args:
            columns: (B, C) row ids of B steps' global batches.
            rows: Slice of a batch that selects R rows: one worker's share.

        Returns:
            (B, R, C) float32 similarities of each selected row to all rows of its batch: cosines or rank-space
            similarities in [-1, 1], or a cross-encoder's scores, which are logits if it has no activation.
        """
        ...


class Embedder(Protocol):
    """Interface of an encoder, as embedding needs it."""

    def encode(
        self,
        texts: Sequence[str],
        *,
        role: Role = ...,
        batch_tokens: int | None = ...,
        normalize: bool | None = ...,
        precision: str = ...,
        on_progress: Callable[[int], None] | None = ...,
    ) -> NDArray[np.float32]:
        """Embed n texts; return (n, d) float32 vectors. `role` comes with queries and documents only."""
        ...


Pairs = Sequence[tuple[str, str]]


class PairScorer(Protocol):
    """Interface of a cross-encoder, as scoring needs it."""

    def score_each(
        self,
        groups: Iterable[Pairs],
        *,
        batch_tokens: int | None = ...,
        precision: str = ...,
        on_progress: Callable[[int], None] | None = ...,
    ) -> Iterator[NDArray[np.float64]]:
        """Score groups of pairs, a query first in each; yield the (n,) scores of each group's n pairs."""
        ...

    def score(
        self, pairs: Pairs, *, precision: str = ..., on_progress: Callable[[int], None] | None = ...
    ) -> NDArray[np.float64]:
        """Return the (n,) scores of n pairs."""
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
    """Serves cosines by running the frozen encoder for every list, for a corpus that is read only once."""

    def __init__(self, encoder: Embedder, corpus: Corpus, precision: str, tokens_per_batch: int | None) -> None:
        self._encoder = encoder
        self._corpus = corpus
        self._precision = precision
        self._tokens_per_batch = tokens_per_batch

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        steps, length = columns.shape
        unique, indices = np.unique(columns.ravel(), return_inverse=True)
        with naming_rows(unique):
            encode = partial(
                self._encoder.encode, batch_tokens=self._tokens_per_batch, precision=self._precision, normalize=False
            )
            encoded = self._corpus.encode(unique, encode)
        return cosines(normalize_rows(encoded, unique)[indices].reshape(steps, length, -1), rows)


class PairTeacher:
    """Serves the scores of a model that reads pairs; a step scores R·C pairs."""

    def __init__(self, scorer: PairScorer, corpus: Corpus, precision: str, tokens_per_batch: int | None) -> None:
        self._scorer = scorer
        self._corpus = corpus
        self._precision = precision
        self._tokens_per_batch = tokens_per_batch

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """Score the pairs of each row's sentence (first) and each column's sentence.

        Args:
            columns: (B, C) row ids of B steps' global batches.
            rows: Slice of a batch that selects the R rows.

        Returns:
            (B, R, C) float32 scores: probabilities in [0, 1] with a sigmoid, the default, and logits without an activation.
        """
        texts = [self._corpus.texts(batch) for batch in columns]
        scores = self._scorer.score_each(
            (list(product(step[rows], step)) for step in texts),
            batch_tokens=self._tokens_per_batch,
            precision=self._precision,
        )
        lists = [scored.reshape(-1, columns.shape[1]) for scored in scores]
        for step, scored in zip(texts, lists, strict=True):
            if len(bad := np.argwhere(~np.isfinite(scored))):
                raise not_finite(step[rows][bad[0, 0]], step[bad[0, 1]])
        return np.stack(lists).astype(np.float32)


def not_finite(first: str, other: str) -> TeacherOutputError:
    """Return the error of a pair's score."""
    return TeacherOutputError(
        f"the teacher's score of {first[:60]!r} and {other[:60]!r} is not finite; try precision: fp32"
    )


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


class RankSpaceTeacher:
    """Serves rank-space similarities of a table's rows, with rows of the same table as references.

    Args:
        table: Unit vectors of the corpus.
        references: Row ids of the reference sentences.
        ranks: `sort` (default) or `histogram`, see `RankSpace`.
        device: Device that ranks the sentences. Default: `cpu`.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        references: NDArray[np.int64],
        ranks: str = "sort",
        device: str = "cpu",
    ) -> None:
        from distcse.rank_space import rank_space  # imports PyTorch, which servers of cosines do without

        self._table = table
        self._space = rank_space(table.vectors(references), ranks, device)

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """Return the (B, R, C) rank-space similarities in [-1, 1] of (B, C) row ids; see `Teacher.similarities`."""
        return np.stack(self._space.lists((self._table.vectors(batch) for batch in columns), rows))


def open_table_teacher(teacher: TeacherSection, table: EmbeddingTable) -> Teacher:
    """Create a teacher that serves cosines or rank-space similarities from its complete table.

    A rank space's references do not depend on the recipe's seed, so that all seeds of a sweep share its server.
    """
    if teacher.similarity == "cosine":
        return TableTeacher(table)
    from distcse.devices.device import default_device
    from distcse.rank_space import draw_references

    references = draw_references(table.identity.rows, teacher.num_references)
    return RankSpaceTeacher(table, references, teacher.rank_method, default_device())


def worker_tables(section: TeachersSection, tables: Sequence[EmbeddingTable | None]) -> dict[int, EmbeddingTable]:
    """Return the tables whose lists the training workers compute, by teacher index: cosines, without `teachers.serve: actor`."""
    return {
        number: table
        for number, (teacher, table) in enumerate(zip(section.encoders, tables, strict=True))
        if table is not None and teacher.similarity == "cosine" and section.serve == "auto"
    }
