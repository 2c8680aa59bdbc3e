"""Vector targets: where a student's vectors shall lie, from the teachers' tables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from distcse.errors import EmbeddingTableError
from distcse.files import text_checksum
from distcse.storage import atomic_write, fetch
from distcse.teachers.knn_graph import joined_vectors
from distcse.teachers.table import EmbeddingTable, TableIdentity

_NAME, _KEY, _DIGEST = "projection", "of", "blake2b"


@dataclass(frozen=True)
class TargetSpec:
    """Where targets are found; small enough to be told to a worker.

    Attributes:
        tables: Folder and identity of each teacher's table.
        alphas: The teachers' weights.
        projection: File of the (Σ d, d) projection; None where one teacher's vectors are the targets as they are.
    """

    tables: Sequence[tuple[Path, TableIdentity]]
    alphas: Sequence[float]
    projection: Path | None = None

    @property
    def key(self) -> str:
        """Of what a projection is for: the tables and their shares."""
        shares = [alpha / sum(self.alphas) for alpha in self.alphas]
        described = json.dumps([[identity.key for _, identity in self.tables], shares])
        return text_checksum(described)

    def open(self) -> Targets:
        """The targets, ready to be read."""
        tables = [EmbeddingTable(directory, identity) for directory, identity in self.tables]
        return Targets(tables, self.alphas, None if self.projection is None else read_projection(self.projection))


class Targets:
    """Unit vectors of a corpus's rows in the space that the student shall share."""

    def __init__(
        self, tables: Sequence[EmbeddingTable], alphas: Sequence[float], projection: NDArray[np.float32] | None
    ) -> None:
        self._tables = tables
        self._alphas = alphas
        self._projection = projection

    def vectors(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """(n,) row ids -> (n, d) float32 unit vectors."""
        joined = joined_vectors(self._tables, self._alphas, rows)
        if self._projection is None:
            return joined
        projected = joined @ self._projection
        return np.asarray(projected / np.linalg.norm(projected, axis=1, keepdims=True), dtype=np.float32)


def fit_projection(
    joined: NDArray[np.float32], aligned: NDArray[np.float32], start: NDArray[np.float32]
) -> NDArray[np.float32]:
    """(n, D) joined teachers' vectors; (m, D) some of them, (m, d) the student's at its start -> (D, d) projection.

    The inner products of joined vectors are the teachers' weighted mean cosines. Principal components about zero keep as
    much of all inner products as d numbers can; among their rotations, which change no inner product, the one nearest to
    where the student is (orthogonal Procrustes) leaves it the shortest way.
    """
    width, wanted = joined.shape[1], start.shape[1]
    wide = joined.astype(np.float64)
    basis = np.linalg.eigh(wide.T @ wide)[1][:, -wanted:] if width > wanted else np.eye(width)
    left, _, right = np.linalg.svd(
        (aligned.astype(np.float64) @ basis).T @ start.astype(np.float64), full_matrices=False
    )
    return np.asarray(basis @ (left @ right), dtype=np.float32)


def write_projection(projection: NDArray[np.float32], key: str, file: Path) -> None:
    """Store a (D, d) projection: who has the teachers' vectors of a document puts them into the student's space by it."""
    with atomic_write(file) as beside:
        stored = np.ascontiguousarray(projection)
        save_file({_NAME: stored}, beside, metadata={_KEY: key, _DIGEST: _digest(stored)})


def projection_of(file: Path) -> str:
    """The key of what a stored projection is for: weights of teachers may change in the middle of a sweep's trial."""
    with _opened(file) as stored:
        return str((stored.metadata() or {}).get(_KEY))


def read_projection(file: Path) -> NDArray[np.float32]:
    """A projection as it was stored. Raises `TeacherError` where the file is damaged."""
    with _opened(file) as stored:
        projection = np.asarray(stored.get_tensor(_NAME))
        if (stored.metadata() or {}).get(_DIGEST) != _digest(projection):
            raise EmbeddingTableError(
                f"{file} is damaged: its checksum differs; remove it and --resume: it is fitted again"
            )
    return projection


def _digest(projection: NDArray[np.float32]) -> str:
    return hashlib.blake2b(projection.tobytes(), digest_size=16).hexdigest()


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    fetch(file)
    try:
        with safe_open(file, framework="numpy") as stored:
            yield stored
    except (OSError, SafetensorError) as broken:
        told = f"{file} holds no projection of targets ({broken})"
        raise EmbeddingTableError(f"{told}; remove it and --resume: it is fitted again") from broken
