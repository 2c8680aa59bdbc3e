"""The k-nearest-neighbor graph of a corpus by the teachers' similarities, computed once and cached next to the tables.

<cache>/knn_graphs/<key>/neighbors.npy  (n, k) int32 row ids, nearest first, -1 where there are fewer
                         graph.json     tables, weights and k that the graph was computed from, and blake2b of the .npy
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EmbeddingTableError
from distcse.storage import ArtifactStore, content_key, dump_label, load_checked_label, open_store
from distcse.teachers.knn import knn
from distcse.teachers.table import EmbeddingTable, TableLocation

_FORMAT = 1
_FILE, _LABEL = "neighbors.npy", "graph.json"


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


@dataclass(frozen=True)
class KnnGraphSpec:
    """Describes a neighbor graph; small enough to send to another process."""

    tables: Sequence[TableLocation]
    """Location of each teacher's complete table, all of the same corpus."""
    alphas: Sequence[float]
    """The teachers' weights."""
    num_neighbors: int
    """Neighbors per row."""
    cache: ArtifactStore
    """The cache folder."""

    @property
    def store(self) -> ArtifactStore:
        """The graph's folder in the cache."""
        return self.cache / "knn_graphs" / content_key(self._identity)

    def find(self) -> Path | None:
        """Return the graph's folder; None if the cache has no intact graph."""
        store = self.store
        stored = store.fetch_cached()
        if not _is_intact(store.path):
            return None
        store.publish(is_new=not stored)
        return store.path

    def prepare(self, on_progress: Callable[[int], None] | None = None) -> Path:
        """Return the graph's folder, after computing the graph unless it is in the cache.

        Args:
            on_progress: See `knn`.

        Raises:
            MissingDependencyError: faiss is not installed.
            StorageWriteError: The cache cannot be written.
        """
        if (folder := self.find()) is not None:
            return folder
        store, tables = self.store, [table.open() for table in self.tables]
        vectors = joined_vectors(tables, self.alphas, np.arange(tables[0].identity.rows))
        _, found = knn(vectors, self.num_neighbors, "training.neighbor_batching", on_progress)
        with store.write_folder(lambda: _is_intact(store.path)) as temporary:
            np.save(temporary / _FILE, _drop_self(found)[:, : self.num_neighbors].astype(np.int32))
            (temporary / _LABEL).write_text(dump_label(temporary / _FILE, inputs=self._identity))
        store.publish(is_new=True)
        return store.path

    @property
    def _identity(self) -> list[Any]:
        weights = [alpha / sum(self.alphas) for alpha in self.alphas]
        return [_FORMAT, [table.identity.key for table in self.tables], weights, self.num_neighbors]


def knn_graph_checksum(folder: Path) -> str:
    """Return the stored checksum of a graph; a resumed run compares it with that of its first start."""
    return str(json.loads((folder / _LABEL).read_bytes())["blake2b"])


def open_knn_graph(folder: Path) -> NDArray[np.int32]:
    """Open a graph's (n, k) row ids, memory-mapped.

    Raises:
        EmbeddingTableError: The folder has no readable graph.
    """
    store = open_store(folder)
    store.fetch_folder()
    try:
        return np.asarray(np.load(folder / _FILE, mmap_mode="r", allow_pickle=False))
    except (OSError, EOFError, ValueError) as error:
        raise EmbeddingTableError(
            f"{store} has no readable neighbor graph ({error}); start the run again to compute it"
        ) from None


def _drop_self(found: NDArray[np.int64]) -> NDArray[np.int64]:
    """Replace row i in its own list of (n, k + 1) ids by -1, and move all -1 to the end.

    Row i can have any position in its list, or be missing, because duplicates have the same cosine.
    """
    is_self = found == np.arange(len(found))[:, None]
    order = np.argsort(is_self | (found < 0), axis=1, kind="stable")
    return np.take_along_axis(np.where(is_self, -1, found), order, axis=1)


def _is_intact(folder: Path) -> bool:
    return load_checked_label(folder / _LABEL, folder / _FILE) is not None
