"""The embedding table: every row of a corpus embedded once by one frozen teacher, on disk, for every later run.

    <cache>/tables/<key>/table.json        identity, rows, rows a shard
                         shard-00000.npy   (rows, dimension) float16, unit length, C order
                         shard-00000.json  rows, dimension, blake2b of the .npy

A shard counts once its .json is there: the .npy is written beside, flushed and renamed first, the .json after it, so a
kill at any moment leaves either a whole shard or none. In object storage a shard is a folder of these two, and counts once it
has its record; a machine fetches the shards that it serves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distcse import files
from distcse.errors import EmbeddingTableError, TeacherOutputError
from distcse.files import checksum, storage_errors, text_checksum
from distcse.storage import fetch_folder, is_stored, upload_dir, write_text_atomic

FORMAT = 1


@dataclass(frozen=True)
class TableIdentity:
    """All that decides a table's numbers. A wrong hit is worse than a miss, so everything is in the key."""

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
        """Name of the table's folder: 32 hexadecimal digits over the whole identity."""
        text = json.dumps(asdict(self), sort_keys=True)
        return text_checksum(text)

    @property
    def shards(self) -> int:
        return -(-self.rows // self.shard_rows)


def normalize_rows(vectors: NDArray[np.float32], rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
    """(n, d) vectors of these rows of the corpus -> the same of unit length.

    Raises:
        TeacherError: One is not finite, or has no direction; with its row.
    """
    # By the largest number first: the squares of 1e20 and of 1e-30 are no float32.
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    usable = np.isfinite(largest) & (largest > 0)
    if len(bad := np.flatnonzero(~usable[:, 0])):
        found = "a zero vector" if largest[bad[0], 0] == 0 else "a vector that is not finite"
        raise TeacherOutputError(
            f"the teacher gives {found} for row {rows[bad[0]]} of the corpus ({len(bad)} such rows of {len(vectors)}); "
            "try precision: fp32, or take the rows out of the corpus"
        )
    scaled = vectors / largest
    return np.asarray(scaled / np.linalg.norm(scaled, axis=1, keepdims=True), dtype=np.float32)


class EmbeddingTable:
    """One teacher's unit vectors for all rows of one corpus."""

    def __init__(self, directory: Path, identity: TableIdentity) -> None:
        self.directory = directory
        self.identity = identity
        self._opened: dict[int, NDArray[np.float16]] = {}

    @classmethod
    def locate(cls, cache: Path, identity: TableIdentity) -> EmbeddingTable:
        """The table of this identity in `cache`, its folder made and labelled if it is new; shards may be missing."""
        directory = cache / "tables" / identity.key
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        write_text_atomic(directory / "table.json", json.dumps(asdict(identity), indent=2))
        return cls(directory, identity)

    def shard_range(self, shard: int) -> range:
        """Row ids of a shard."""
        first = shard * self.identity.shard_rows
        return range(first, min(first + self.identity.shard_rows, self.identity.rows))

    def missing_shards(self) -> list[int]:
        """Shards that are absent or damaged: every checksum is computed, so call it once a run, not once a worker."""
        with ThreadPoolExecutor(max_workers=4) as pool:
            intact = list(pool.map(self._is_intact, range(self.identity.shards)))
        return [shard for shard, whole in enumerate(intact) if not whole]

    def write_shard(self, shard: int, vectors: NDArray[np.float32]) -> None:
        """Store (rows, dimension) float32 vectors as unit-length float16; the rows are `shard_range(shard)`.

        Raises `TeacherError` naming the row of a vector that is not finite or has no direction.
        """
        rows = self.shard_range(shard)
        if len(vectors) != len(rows):
            raise ValueError(f"shard {shard} has {len(rows)} rows, got {len(vectors)} vectors")
        units = normalize_rows(vectors, rows)
        with storage_errors(self.directory):
            self.directory.mkdir(exist_ok=True, parents=True)  # a mirror of this machine may not have it yet
        with files.atomic_write(self._payload(shard)) as beside:
            with open(beside, "wb") as file:
                np.save(file, units.astype(np.float16))
            label = {"rows": len(rows), "dimension": vectors.shape[1], "blake2b": checksum(beside)}
        files.write_text_atomic(self._label(shard), json.dumps(label))
        upload_dir(self._stored(shard), self._parts(shard))

    def vectors(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """(n,) row ids -> (n, dimension) float32 unit vectors. Normalised again: float16 moves a norm by 1e-4."""
        ids = np.asarray(rows, dtype=np.int64)
        order = np.argsort(ids, kind="stable")
        shards = ids[order] // self.identity.shard_rows
        bounds = np.flatnonzero(np.diff(shards)) + 1
        out: NDArray[np.float32] | None = None
        for places in np.split(order, bounds):
            shard = int(ids[places[0]] // self.identity.shard_rows)
            part = self._open(shard)[ids[places] - shard * self.identity.shard_rows]
            if out is None:
                out = np.empty((len(ids), part.shape[1]), dtype=np.float32)
            out[places] = part
        if out is None:
            return np.empty((0, 0), dtype=np.float32)
        norms = np.linalg.norm(out, axis=1, keepdims=True)
        if not (np.isfinite(norms) & (norms > 0)).all():
            row = ids[np.flatnonzero(~(np.isfinite(norms[:, 0]) & (norms[:, 0] > 0)))[0]]
            raise EmbeddingTableError(
                f"table {self.directory} is damaged at row {row}: shard {row // self.identity.shard_rows} is not what was "
                "written; start the run again, and it is embedded anew"
            )
        out /= norms
        return out

    def _open(self, shard: int) -> NDArray[np.float16]:
        if shard not in self._opened:
            fetch_folder(self._stored(shard), into=self.directory)
            if not self._payload(shard).exists():
                raise EmbeddingTableError(
                    f"table {self.directory} has no shard {shard}; run again to embed what is missing"
                )
            try:
                self._opened[shard] = np.load(self._payload(shard), mmap_mode="r", allow_pickle=False)
            except (OSError, EOFError, ValueError) as broken:
                raise EmbeddingTableError(
                    f"{self._payload(shard)} cannot be read ({broken}); start the run again, and it is embedded anew"
                ) from None
        return self._opened[shard]

    def _is_intact(self, shard: int) -> bool:
        """In object storage a shard is what its record says: it is not fetched, for it is needed where it is served."""
        if is_stored(self._stored(shard)):
            return True
        try:
            label = json.loads(self._label(shard).read_bytes())
            intact = bool(
                label["rows"] == len(self.shard_range(shard)) and label["blake2b"] == checksum(self._payload(shard))
            )
        except (OSError, ValueError, KeyError, TypeError):  # absent or half a label: not intact, to be built again
            return False
        if intact:  # here alone, where storage was away when it was written
            upload_dir(self._stored(shard), self._parts(shard))
        return intact

    def _stored(self, shard: int) -> Path:
        """What a shard's files are stored as, in object storage."""
        return self.directory / f"shard-{shard:05d}"

    def _parts(self, shard: int) -> dict[str, Path]:
        return {file.name: file for file in (self._payload(shard), self._label(shard))}

    def _payload(self, shard: int) -> Path:
        return self.directory / f"shard-{shard:05d}.npy"

    def _label(self, shard: int) -> Path:
        return self.directory / f"shard-{shard:05d}.json"
