"""The embedding table: a frozen teacher's vectors of all rows of a corpus, computed once and cached on disk.

    <cache>/tables/<key>/table.json        identity, rows, rows per shard
                         shard-00000.npy   (rows, dimension) float16, unit length, C order
                         shard-00000.json  rows, dimension, blake2b of the .npy

A shard is complete once its .json exists: the .npy is written to a temporary file, synced and renamed first, the .json
afterwards. A kill at any moment therefore leaves a complete shard or none. In object storage, a shard is a folder with these
two files, complete once it has its record. A machine downloads only the shards that it serves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EmbeddingTableError, TeacherOutputError
from distcse.storage import (
    ArtifactStore,
    atomic_write,
    dump_label,
    load_checked_label,
    open_store,
    storage_errors,
    text_checksum,
    write_text_atomic,
)

FORMAT = 1


@dataclass(frozen=True)
class TableIdentity:
    """Everything that determines a table's values, and thus its key in the cache."""

    model: str
    """Fingerprint of the model's files."""
    corpus: str
    """Fingerprint of the corpus."""
    rows: int
    pooling: str | None
    max_length: int | None
    prompt: str
    precision: str
    shard_rows: int
    format: int = FORMAT

    @property
    def key(self) -> str:
        """Name of the table's folder: a hash of all fields, as 32 hexadecimal digits."""
        text = json.dumps(asdict(self), sort_keys=True)
        return text_checksum(text)

    @property
    def shards(self) -> int:
        return -(-self.rows // self.shard_rows)


def normalize_rows(vectors: NDArray[np.float32], rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
    """Scale vectors to unit length.

    Args:
        vectors: (n, d) vectors.
        rows: Their n row ids, for the error message.

    Returns:
        (n, d) float32 unit vectors.

    Raises:
        TeacherOutputError: A vector is zero, NaN or infinite; the message names its row.
    """
    # Divide by the largest component first: squares of 1e20 or 1e-30 overflow or underflow float32.
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    usable = np.isfinite(largest) & (largest > 0)
    if len(bad := np.flatnonzero(~usable[:, 0])):
        kind = "a zero vector" if largest[bad[0], 0] == 0 else "a vector that is not finite"
        raise TeacherOutputError(
            f"the teacher outputs {kind} for row {rows[bad[0]]} of the corpus ({len(bad)} such rows of {len(vectors)}); "
            "try precision: fp32, or remove these rows from the corpus"
        )
    scaled = vectors / largest
    return np.asarray(scaled / np.linalg.norm(scaled, axis=1, keepdims=True), dtype=np.float32)


class EmbeddingTable:
    """One teacher's unit vectors of all rows of one corpus, stored in shards.

    Args:
        directory: The table's folder.
        identity: What determines the table's values.
    """

    def __init__(self, directory: Path, identity: TableIdentity) -> None:
        self.store = open_store(directory)
        self.identity = identity
        self._opened: dict[int, NDArray[np.float16]] = {}

    @property
    def directory(self) -> Path:
        """The table's local folder."""
        return self.store.path

    @classmethod
    def locate(cls, cache: Path, identity: TableIdentity) -> EmbeddingTable:
        """Open the table with this identity in `cache`; create its folder and table.json if needed. Shards may be missing.

        Raises:
            StorageWriteError: The folder or table.json cannot be written.
        """
        table = cls.at(cache, identity)
        with storage_errors(table.directory):
            table.directory.mkdir(parents=True, exist_ok=True)
        table.store.write_text("table.json", json.dumps(asdict(identity), indent=2))
        return table

    @classmethod
    def at(cls, cache: Path, identity: TableIdentity) -> EmbeddingTable:
        """Return the table with this identity in `cache`, which may not exist. Nothing is written."""
        return cls(cache / "tables" / identity.key, identity)

    def shard_range(self, shard: int) -> range:
        """Return the row ids of a shard."""
        first = shard * self.identity.shard_rows
        return range(first, min(first + self.identity.shard_rows, self.identity.rows))

    def missing_shards(self) -> list[int]:
        """Return the shards that are missing or damaged. Call it once per run: it computes every shard's checksum."""
        with ThreadPoolExecutor(max_workers=4) as pool:
            intact = list(pool.map(self.is_intact, range(self.identity.shards)))
        return [shard for shard, is_intact in enumerate(intact) if not is_intact]

    def write_shard(self, shard: int, vectors: NDArray[np.float32]) -> None:
        """Store a shard's vectors, normalized to unit length, as float16.

        Args:
            shard: Index of the shard.
            vectors: (len(shard_range(shard)), d) float32 vectors.

        Raises:
            TeacherOutputError: A vector is zero, NaN or infinite; the message names its row.
            StorageWriteError: The shard cannot be written.
        """
        rows = self.shard_range(shard)
        if len(vectors) != len(rows):
            raise ValueError(f"shard {shard} has {len(rows)} rows, got {len(vectors)} vectors")
        units = normalize_rows(vectors, rows)
        with storage_errors(self.directory):
            self.directory.mkdir(exist_ok=True, parents=True)  # this machine's copy of remote storage may lack it
        with atomic_write(self._payload(shard)) as temporary:
            with open(temporary, "wb") as file:
                np.save(file, units.astype(np.float16))
            label = dump_label(temporary, rows=len(rows), dimension=vectors.shape[1])
        write_text_atomic(self._label(shard), label)
        self._stored(shard).publish(self._parts(shard))

    @property
    def dimension(self) -> int:
        """d, the size of a vector.

        Raises:
            EmbeddingTableError: The first shard is missing or damaged.
            ObjectStorageError: It cannot be downloaded.
        """
        return int(self._open(0).shape[1])

    def vectors(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """Read the vectors of n row ids. They are normalized again, because float16 changes norms by 1e-4.

        Returns:
            (n, d) float32 unit vectors.

        Raises:
            EmbeddingTableError: A shard is missing or damaged.
            ObjectStorageError: A shard cannot be downloaded.
        """
        ids = np.asarray(rows, dtype=np.int64)
        if not len(ids):
            return np.empty((0, 0), dtype=np.float32)
        found = self._gather(ids, np.dtype(np.float32))
        found /= self._norms(ids, found)
        return found

    def stored_vectors(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float16]:
        """Read the vectors of n row ids as they are stored; their norms are between 0.9999 and 1.0001.

        Returns:
            (n, d) float16 vectors.

        Raises:
            EmbeddingTableError: A shard is missing or damaged.
            ObjectStorageError: A shard cannot be downloaded.
        """
        ids = np.asarray(rows, dtype=np.int64)
        found: NDArray[np.float16] = self._gather(ids, np.dtype(np.float16))
        self._norms(ids, found.astype(np.float32))  # raises for a damaged row
        return found

    def _gather(self, ids: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Gather (n, d) vectors from their shards, converted to a type but not normalized."""
        order = np.argsort(ids, kind="stable")
        bounds = np.flatnonzero(np.diff(ids[order] // self.identity.shard_rows)) + 1
        found = np.empty((len(ids), self._open(int(ids[0] // self.identity.shard_rows)).shape[1]), dtype=dtype)
        for indices in np.split(order, bounds):
            shard = int(ids[indices[0]] // self.identity.shard_rows)
            found[indices] = self._open(shard)[ids[indices] - shard * self.identity.shard_rows]
        return found

    def _norms(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the (n, 1) norms of rows' vectors.

        Raises:
            EmbeddingTableError: A vector is zero, NaN or infinite.
        """
        norms: NDArray[np.float32] = np.linalg.norm(vectors, axis=1, keepdims=True)
        is_intact = np.isfinite(norms[:, 0]) & (norms[:, 0] > 0)
        if not is_intact.all():
            row = ids[np.flatnonzero(~is_intact)[0]]
            raise EmbeddingTableError(
                f"table {self.store} is damaged at row {row} in shard {row // self.identity.shard_rows}; "
                "start the run again to embed the shard again"
            )
        return norms

    def _open(self, shard: int) -> NDArray[np.float16]:
        if shard not in self._opened:
            self._stored(shard).fetch_folder(into=self.directory)
            if not self._payload(shard).exists():
                raise EmbeddingTableError(
                    f"table {self.store} has no shard {shard}; start the run again to embed missing shards"
                )
            try:
                self._opened[shard] = np.load(self._payload(shard), mmap_mode="r", allow_pickle=False)
            except (OSError, EOFError, ValueError) as error:
                raise EmbeddingTableError(
                    f"{self.store}/{self._payload(shard).name} cannot be read ({error}); start the run again to embed the "
                    "shard again"
                ) from None
        return self._opened[shard]

    def is_intact(self, shard: int) -> bool:
        """Return whether a shard is complete. Trust its record in object storage: only the server downloads the shard."""
        stored = self._stored(shard)
        if stored.has_folder():
            return True
        label = load_checked_label(self._label(shard), self._payload(shard))
        if label is None or label.get("rows") != len(self.shard_range(shard)):
            return False  # missing or damaged: will be embedded again
        stored.publish(self._parts(shard))  # not uploaded yet if object storage was unreachable when it was written
        return True

    def _stored(self, shard: int) -> ArtifactStore:
        """Return the location of a shard in object storage."""
        return self.store / f"shard-{shard:05d}"

    def _parts(self, shard: int) -> dict[str, Path]:
        return {file.name: file for file in (self._payload(shard), self._label(shard))}

    def _payload(self, shard: int) -> Path:
        return self.directory / f"shard-{shard:05d}.npy"

    def _label(self, shard: int) -> Path:
        return self.directory / f"shard-{shard:05d}.json"
