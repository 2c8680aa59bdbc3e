"""Target vectors for the student, computed from the teachers' tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from distcse.errors import EmbeddingTableError, InvalidValueError
from distcse.storage import ArtifactStore, bytes_checksum, content_key, open_store, to_uri
from distcse.teachers.table import EmbeddingTable


@dataclass(frozen=True)
class TargetSpec:
    """Describes where targets are stored; small enough to send to a worker."""

    tables: Sequence[EmbeddingTable]
    """Each teacher's."""
    alphas: Sequence[float]
    """The teachers' weights."""
    projection: ArtifactStore | None = None
    """File of the (Σ d_t, d) projection; None if one teacher's vectors are the targets."""

    @property
    def key(self) -> str:
        """Hash of what a projection was fitted to: the tables and the teachers' relative weights."""
        shares = [alpha / sum(self.alphas) for alpha in self.alphas]
        return content_key([[table.identity.key for table in self.tables], shares])

    def open(self) -> Targets:
        """Read the projection; an `EmbeddingTableError` if it is missing or damaged."""
        projection = None if self.projection is None else Projection.read(self.projection.path).matrix
        return Targets(self.tables, self.alphas, projection)


def joined_vectors(
    tables: Sequence[EmbeddingTable], alphas: Sequence[float], rows: Sequence[int] | NDArray[np.int64]
) -> NDArray[np.float32]:
    """Concatenate the teachers' vectors so that inner products are the teachers' weighted mean cosines (RankCSE §4.4).

    Args:
        tables: One table per teacher, with dimensions d_t.
        alphas: The teachers' weights.
        rows: n row ids.

    Returns:
        (n, Σ d_t) float32 unit vectors.
    """
    shares = np.sqrt(np.asarray(alphas, dtype=np.float64) / sum(alphas)).astype(np.float32)
    return np.concatenate([share * table.vectors(rows) for share, table in zip(shares, tables, strict=True)], axis=1)


class Targets:
    """Target unit vectors of a corpus's rows, in the student's space; see `TargetSpec`."""

    def __init__(
        self, tables: Sequence[EmbeddingTable], alphas: Sequence[float], projection: NDArray[np.float32] | None
    ) -> None:
        self._tables = tables
        self._alphas = alphas
        self._projection = projection

    def vectors(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the (n, d) float32 unit vectors of n row ids; a vector that the projection maps to zero stays zero."""
        joined = joined_vectors(self._tables, self._alphas, rows)
        if self._projection is None:
            return joined
        return _project(joined, self._projection)


class TargetReader:
    """Reads the target vectors of training steps on a thread, some steps ahead, so that slow storage is not waited for.

    Args:
        targets: The targets.
        rows_of: Maps a step to the (R,) row ids of this worker.
        num_steps: Steps of the training; none is read from there on.
        steps_ahead: Steps that are read before training reaches them. Default: 8.
    """

    def __init__(
        self, targets: Targets, rows_of: Callable[[int], NDArray[np.int64]], num_steps: int, steps_ahead: int = 8
    ) -> None:
        self._targets, self._rows_of = targets, rows_of
        self._num_steps, self._steps_ahead = num_steps, steps_ahead
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="targets")
        self._requested: dict[int, Future[NDArray[np.float32]]] = {}

    def vectors(self, step: int) -> NDArray[np.float32]:
        """Return the (R, d) target vectors of a step."""
        wanted = range(step, max(step + 1, min(step + 1 + self._steps_ahead, self._num_steps)))
        self._requested = {
            each: self._requested.get(each) or self._thread.submit(self._targets.vectors, self._rows_of(each))
            for each in wanted
        }
        return self._requested[step].result()

    def close(self) -> None:
        """Read no further step. The end of the process waits at most for the step that is being read."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _project(joined: NDArray[np.float32], projection: NDArray[np.float32]) -> NDArray[np.float32]:
    projected = joined @ projection
    norms = np.linalg.norm(projected, axis=1, keepdims=True)
    return np.asarray(projected / np.where(norms > 0, norms, 1), dtype=np.float32)


def fit_projection(
    joined: NDArray[np.float32], aligned: NDArray[np.float32], start: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Fit the projection from the teachers' joined vectors to the student's space.

    Uncentered principal components preserve the inner products best among all d-dimensional projections. A rotation does
    not change inner products; orthogonal Procrustes picks the rotation nearest to the student's initial vectors.

    Args:
        joined: (n, D) joined teacher vectors of a sample; see `joined_vectors`.
        aligned: (m, D) joined teacher vectors of the sentences in `start`.
        start: (m, d) vectors of the student before training.

    Returns:
        (D, d) float32 projection.
    """
    joined_dim, student_dim = joined.shape[1], start.shape[1]
    wide = joined.astype(np.float64)
    basis = np.linalg.eigh(wide.T @ wide)[1][:, -student_dim:] if joined_dim > student_dim else np.eye(joined_dim)
    left, _, right = np.linalg.svd(
        (aligned.astype(np.float64) @ basis).T @ start.astype(np.float64), full_matrices=False
    )
    return np.asarray(basis @ (left @ right), dtype=np.float32)


def kept_share(joined: NDArray[np.float32], projection: NDArray[np.float32]) -> float:
    """Measure what a projection keeps of all inner products.

    Args:
        joined: (n, D) joined teacher vectors of rows on which the projection was not fitted.
        projection: (D, d) projection.

    Returns:
        Squared correlation, over all pairs of different rows, of the inner products with the projected rows' cosines: the
        share of their variance that is kept. A constant or a factor does not count as a loss, as in a rank correlation.
    """
    pairs = np.triu_indices(len(joined), 1)
    projected = _project(joined, projection)
    before, after = ((vectors @ vectors.T)[pairs] for vectors in (joined, projected))
    return float(np.corrcoef(before, after)[0, 1] ** 2)


@dataclass(frozen=True)
class Projection:
    """A projection of the teachers' joined vectors, also of new ones, into the student's space; stored as safetensors."""

    matrix: NDArray[np.float32]
    """(D, d)."""
    key: str
    """`TargetSpec.key` of what it was fitted to; a sweep can change the weights during a trial."""
    kept: float
    """Its `kept_share`."""

    def write(self, file: ArtifactStore) -> None:
        """Store it in a file."""
        stored = np.ascontiguousarray(self.matrix)
        metadata = {"of": self.key, "kept": repr(self.kept), "blake2b": bytes_checksum(stored.tobytes())}
        with file.parent.write(file.name) as temporary:
            save_file({"projection": stored}, temporary, metadata=metadata)

    @classmethod
    def read(cls, file: Path) -> Projection:
        """Read a file; an `EmbeddingTableError` if it is missing or damaged."""
        open_store(file.parent).fetch(file.name)
        try:
            with safe_open(file, framework="numpy") as stored:
                metadata, matrix = stored.metadata(), np.asarray(stored.get_tensor("projection"))
            if metadata["blake2b"] != bytes_checksum(matrix.tobytes()):
                raise ValueError("its checksum differs")
            return cls(matrix, metadata["of"], float(metadata["kept"]))
        except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
            problem = f"{to_uri(file)} has no readable projection of targets ({error})"
            raise EmbeddingTableError(f"{problem}; delete it and run with --resume to fit it again") from error

    @classmethod
    def of_run(cls, run: str, file_name: str, key: str, dimension: int | None = None) -> Projection:
        """Read another run's projection, so that both students' vectors lie in one space.

        Raises:
            InvalidValueError: The other run has no projection, or one of other tables, weights or width.
            EmbeddingTableError: It is damaged.
        """
        name = f"objective.regression.projection: {run}"
        file = open_store(run).path / file_name
        if not open_store(file.parent).fetch(file.name):
            raise InvalidValueError(
                f"{name} has no {file.name}; name the folder of a run whose targets are projected. "
                "Students onto a single teacher of their width have none: they share its space without this key"
            )
        other = cls.read(file)
        if other.key != key:
            raise InvalidValueError(
                f"{name} has a projection of other text, teachers, precisions or weights (alpha); give both runs the same, or "
                "write objective.regression.projection: null"
            )
        width = other.matrix.shape[1]
        if dimension is not None and width != dimension:
            raise InvalidValueError(
                f"{name} has vectors of {width} dimensions, and this student of {dimension}; take a student of that width, or "
                "write objective.regression.projection: null"
            )
        return other


def has_projection(file: ArtifactStore, key: str) -> bool:
    """Return whether a run's file is there, and was fitted to what the key describes."""
    return file.parent.fetch(file.name) and Projection.read(file.path).key == key
