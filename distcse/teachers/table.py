"""The embedding table: a frozen teacher's vectors of all rows of a corpus, computed once and cached on disk.

    <cache>/tables/<key>/table.json        identity, rows, rows per shard
                         shard-00000.npy   (rows, dimension) float16, unit length, C order
                         shard-00000.json  rows, dimension, blake2b of the .npy

A shard is complete once its .json exists: the .npy is written to a temporary file, synced and renamed first, the .json
afterwards. A kill at any moment therefore leaves a complete shard or none. In object storage, a shard is a folder with these
two files, complete once it has its record. A machine downloads only the shards that it serves.

Row i's vector is the i-th. In a corpus with duplicates, each distinct sentence has one vector, in the order of first rows
(see `distcse.text.row_keys`).
"""

from __future__ import annotations

import json
import resource
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EmbeddingTableError, TeacherOutputError
from distcse.storage import (
    ArtifactStore,
    atomic_write,
    content_key,
    dump_label,
    load_checked_label,
    storage_errors,
    write_text_atomic,
)
from distcse.text.row_keys import DistinctRows

FORMAT = 1
_FOLDER, _STATISTICS = "tables", "statistics.json"
_VERIFIED = 8
"""Shards whose checksums are computed between two questions whether to stop."""
SHARD_ROWS = 4096
"""Rows of a shard where the recipe leaves them to the number of rows, up to `MOST_SHARDS` shards."""
MOST_SHARDS = 2500
"""Shards of such a table: a process that may open 20,000 files maps them all. It is not taken from the machine's limit, because
all machines must know a table by the same key."""
OPEN_SHARE = 8
"""A table opens at most one of this many files that the process may open, because each map of a shard is an open file."""
_BLOCK = 16_384
"""Rows whose vectors are converted to float32 at once."""
_HEADERS = Lock()
"""Held while numpy parses a header as Python: in two threads at once, Python 3.11 may raise a SystemError (CPython 106905)."""
_MOST_OPEN = 8192
"""Maps that a table opens where files are not limited; a process may have 65,530 maps on Linux."""


@dataclass(frozen=True)
class TableIdentity:
    """Everything that determines a table's values, and thus its key in the cache."""

    content_name: ClassVar[str] = "TableIdentity"
    model: str
    """Fingerprint of the model's files."""
    corpus: str
    """Fingerprint of the corpus."""
    rows: int
    pooling: str | None
    max_length: int | None
    prompt: str | dict[str, list[Any]]
    """The prompt; of a corpus with roles, the prompt and maximum length of each, by their names."""
    precision: str
    shard_rows: int
    """Vectors per shard."""
    format: int = FORMAT
    distinct: int | None = None
    """Number of distinct sentences, which have one vector each; None if no sentence occurs twice."""

    @property
    def key(self) -> str:
        """Name of the table's folder: a hash of all fields, as 32 hexadecimal digits."""
        return content_key(self)

    @property
    def vectors(self) -> int:
        """Number of vectors."""
        return self.rows if self.distinct is None else self.distinct

    @property
    def shards(self) -> int:
        return -(-self.vectors // self.shard_rows)

    def has_teacher_of(self, other: TableIdentity) -> bool:
        """Return whether equal sentences have equal vectors in a table with another identity."""
        one, two = (replace(each, corpus="", rows=0, distinct=None, shard_rows=1) for each in (self, other))
        return one == two


@dataclass(frozen=True)
class StoredVectors:
    """Those of a shard's vectors that another table has."""

    is_stored: NDArray[np.bool_]
    """(n,) whether it has each of the shard's vectors."""
    vectors: NDArray[np.float16]
    """(k, d) vectors where it has."""


BYTES_PER_NUMBER = 2
"""Bytes of a vector's number, a float16."""


def rows_per_shard(setting: int | Literal["auto"], vectors: int) -> int:
    """Return how many rows a table's shards have."""
    if setting != "auto":
        return setting
    rows = SHARD_ROWS
    while vectors > rows * MOST_SHARDS:
        rows *= 2
    return rows


def normalize_rows(vectors: NDArray[np.float32], rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
    """Scale vectors to unit length.

    Args:
        vectors: (n, d) vectors.
        rows: Their n row ids, for the error message.

    Returns:
        (n, d) float32 unit vectors.
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
    """One teacher's unit vectors of all rows of one corpus, stored in shards."""

    def __init__(self, store: ArtifactStore, identity: TableIdentity) -> None:
        self.store = store
        self.identity = identity
        self._opened: OrderedDict[int, NDArray[np.float16]] = OrderedDict()
        self._most_open = _most_open()

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddingTable, (self.store, self.identity)

    @property
    def directory(self) -> Path:
        """The table's local folder."""
        return self.store.path

    @classmethod
    def locate(cls, cache: ArtifactStore, identity: TableIdentity) -> EmbeddingTable:
        """Open the table with this identity in `cache`; create its folder and table.json if needed. Shards may be missing."""
        table = cls.at(cache, identity)
        with storage_errors(table.directory):
            table.directory.mkdir(parents=True, exist_ok=True)
        table.store.write_text("table.json", json.dumps(asdict(identity), indent=2))
        return table

    @classmethod
    def at(cls, cache: ArtifactStore, identity: TableIdentity) -> EmbeddingTable:
        """Return the table with this identity in `cache`, which may not exist. Nothing is written."""
        return cls(cache / _FOLDER / identity.key, identity)

    @classmethod
    def list_all(cls, cache: ArtifactStore) -> Iterator[EmbeddingTable]:
        """Yield the tables in `cache`, without those whose table.json cannot be read. Shards may be missing."""
        tables = cache / _FOLDER
        for name in sorted(tables.list_names()):
            if (content := (tables / name).read("table.json")) is None:
                continue
            try:
                identity = TableIdentity(**json.loads(content))
            except (ValueError, TypeError):  # damaged, or of another version
                continue
            if identity.key == name:
                yield cls.at(cache, identity)

    def shard_range(self, shard: int) -> range:
        """Return the numbers of a shard's vectors: row ids, or numbers of distinct sentences in a table with duplicates."""
        first = shard * self.identity.shard_rows
        return range(first, min(first + self.identity.shard_rows, self.identity.vectors))

    def rows_of(self, shard: int) -> Sequence[int] | NDArray[np.int64]:
        """Return the ids of the rows with a shard's vectors: the first ones of their sentences."""
        numbers = self.shard_range(shard)
        return numbers if self._distinct is None else self._distinct.first[numbers.start : numbers.stop]

    def numbers_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the (n,) numbers of the vectors of (n,) row ids."""
        return rows if self._distinct is None else self._distinct.numbers[rows]

    def shards_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the (n,) shards with the vectors of (n,) row ids."""
        return self.numbers_of(rows) // self.identity.shard_rows

    def missing_shards(self, verify: bool = True, on_progress: Callable[[int], None] | None = None) -> list[int]:
        """Return the shards that are missing or damaged: by their checksums with `verify`, else by their sizes."""
        return self.not_intact(range(self.identity.shards), on_progress) if verify else self._not_there()

    def not_intact(self, shards: Iterable[int], on_progress: Callable[[int], None] | None = None) -> list[int]:
        """Return those of some shards that are missing or damaged, after computing their checksums."""
        shards, missing = list(shards), []
        with ThreadPoolExecutor(max_workers=4) as pool:
            for begin in range(0, len(shards), _VERIFIED):  # what is in the pool, a stop waits for
                part = shards[begin : begin + _VERIFIED]
                for done, is_intact in enumerate(pool.map(self.is_intact, part), start=begin):
                    if on_progress is not None:
                        on_progress(done)
                    if not is_intact:
                        missing.append(shards[done])
        return missing

    def write_shard(
        self,
        shard: int,
        vectors: NDArray[np.float32] | Iterable[NDArray[np.float32]],
        stored: StoredVectors | None = None,
    ) -> None:
        """Store a shard's vectors, normalized to unit length, as float16.

        Args:
            shard: Index of the shard.
            vectors: (n, d) float32 vectors, n = len(shard_range(shard)), or (n - k, d) with `stored`; or consecutive parts of
                them, each of which is converted before the next is taken.
            stored: k of the vectors, which are copied bit by bit. Default: none.
        """
        rows = np.asarray(self.rows_of(shard))
        new = np.arange(len(rows)) if stored is None else np.flatnonzero(~stored.is_stored)
        units, done = np.empty((0, 0), dtype=np.float16), 0
        for part in [vectors] if isinstance(vectors, np.ndarray) else vectors:
            if not units.size:
                units = np.empty((len(rows), part.shape[1]), dtype=np.float16)
            if len(indices := new[done : done + len(part)]) == len(part):
                units[indices] = normalize_rows(part, rows[indices])
            done += len(part)
        if done != len(new):
            raise ValueError(f"shard {shard} has {len(new)} rows, got {done} vectors")
        if stored is not None:
            units[stored.is_stored] = stored.vectors
        with storage_errors(self.directory):
            self.directory.mkdir(exist_ok=True, parents=True)  # this machine's copy of remote storage may lack it
        with atomic_write(self._payload(shard)) as temporary:
            with open(temporary, "wb") as file:
                np.save(file, units)
            label = dump_label(temporary, rows=len(rows), dimension=units.shape[1])
        write_text_atomic(self._label(shard), label)
        self._stored(shard).publish(self._parts(shard))

    @property
    def dimension(self) -> int:
        """d, the size of a vector."""
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
        """
        ids = np.asarray(rows, dtype=np.int64)
        found: NDArray[np.float16] = self._gather(ids, np.dtype(np.float16))
        for begin in range(0, len(ids), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            self._norms(ids[block], found[block].astype(np.float32))  # raises for a damaged row
        return found

    @cached_property
    def _distinct(self) -> DistinctRows | None:
        """The numbers of the rows' vectors; None if they are the rows' ids."""
        if self.identity.distinct is None:
            return None
        return DistinctRows.open(self.identity.corpus, self.store.parent.parent)

    def _gather(self, ids: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Gather (n, d) vectors from their shards, converted to a type but not normalized."""
        numbers, size = self.numbers_of(ids), self.identity.shard_rows
        order = np.argsort(numbers, kind="stable")
        bounds = np.flatnonzero(np.diff(numbers[order] // size)) + 1
        found = np.empty((len(ids), self._open(int(numbers[0] // size)).shape[1]), dtype=dtype)
        for indices in np.split(order, bounds):
            shard = int(numbers[indices[0]] // size)
            found[indices] = self._open(shard)[numbers[indices] - shard * size]
        return found

    def _norms(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the (n, 1) norms of rows' vectors."""
        norms: NDArray[np.float32] = np.linalg.norm(vectors, axis=1, keepdims=True)
        is_intact = np.isfinite(norms[:, 0]) & (norms[:, 0] > 0)
        if not is_intact.all():
            row = ids[np.flatnonzero(~is_intact)[0]]
            raise EmbeddingTableError(
                f"table {self.store} is damaged at row {row} in shard {self.shards_of(row)}; "
                "start the run again to embed the shard again"
            )
        return norms

    def _open(self, shard: int) -> NDArray[np.float16]:
        """Return a shard's memory-mapped vectors. The map that was used longest ago is closed if too many are open."""
        opened = self._opened.pop(shard, None)
        if opened is None:
            opened = self._map(shard)
        self._opened[shard] = opened
        if len(self._opened) > self._most_open:
            self._opened.popitem(last=False)
        return opened

    def _map(self, shard: int) -> NDArray[np.float16]:
        self._stored(shard).fetch_folder(into=self.directory)
        if not self._payload(shard).exists():
            raise EmbeddingTableError(
                f"table {self.store} has no shard {shard}; start the run again to embed missing shards"
            )
        try:
            with _HEADERS:
                mapped: NDArray[np.float16] = np.load(self._payload(shard), mmap_mode="r", allow_pickle=False)
        except (OSError, EOFError, ValueError) as error:
            raise EmbeddingTableError(
                f"{self.store}/{self._payload(shard).name} cannot be read ({error}); start the run again to embed the "
                "shard again"
            ) from None
        return mapped

    def _not_there(self) -> list[int]:
        """Return the shards without a record, or with a file of another size, without reading their vectors."""
        return [shard for shard in range(self.identity.shards) if not self._is_there(shard)]

    def _is_there(self, shard: int) -> bool:
        if self._stored(shard).has_folder():
            return True
        try:
            label = json.loads(self._label(shard).read_bytes())
            stored = np.load(
                self._payload(shard), mmap_mode="r", allow_pickle=False
            )  # raises for a file that is too short
            return bool(stored.shape == (label["rows"], label["dimension"]))
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            return False

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


def _most_open() -> int:
    """Return how many of its shards a table maps at the same time."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_OPEN if limit == resource.RLIM_INFINITY else max(16, min(_MOST_OPEN, limit // OPEN_SHARE))


SAMPLE = 1024
"""Rows of the sample, whose pairs give 523,776 cosines."""
_SAMPLED_SHARDS = 4
"""Shards that the sample is drawn from, because a shard in object storage must be downloaded."""


@dataclass(frozen=True)
class VectorStatistics:
    """What one teacher's vectors look like."""

    mean: float
    """Mean of the cosines of different sentences."""
    spread: float
    """Standard deviation of these cosines."""
    effective_rank: float
    """Exponential of the entropy of the centered vectors' variances along their principal axes (Roy and Vetterli 2007)."""

    @property
    def band(self) -> str:
        """Where the cosines lie, for readers."""
        return f"{self.mean:.2f} ± {self.spread:.3f}"


def measure_statistics(vectors: NDArray[np.float32]) -> VectorStatistics:
    """Measure the statistics of at least two (n, d) unit vectors."""
    cosines = (vectors @ vectors.T)[np.triu_indices(len(vectors), 1)]
    centered = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    variances = np.linalg.svd(centered, compute_uv=False) ** 2
    shares = variances[variances > 0] / variances.sum()
    return VectorStatistics(
        float(cosines.mean()), float(cosines.std()), float(np.exp(-(shares * np.log(shares)).sum()))
    )


def effective_weights(alphas: Mapping[int, float], statistics: Mapping[int, VectorStatistics]) -> dict[int, float]:
    """Return what each teacher weighs in effect in a mean of cosines: its α times its cosines' spread, as shares of 1."""
    scales = {number: alphas[number] * found.spread for number, found in statistics.items()}
    total = sum(scales.values()) or 1.0  # all vectors of each teacher are equal
    return {number: scale / total for number, scale in scales.items()}


def table_statistics(table: EmbeddingTable, keep: bool = False, is_complete: bool = False) -> VectorStatistics | None:
    """Return the statistics of a table's vectors, and store them with `keep`; None if the table has no two vectors yet."""
    with suppress(OSError, ValueError, TypeError):  # damaged, or of another version: measured again
        if (stored := table.store.read_json(_STATISTICS)) is not None:
            return VectorStatistics(**stored)
    shards = np.unique(np.linspace(0, table.identity.shards - 1, _SAMPLED_SHARDS).astype(int)).tolist()
    if not is_complete and not all(table.is_intact(shard) for shard in shards):
        return None
    rows = np.concatenate([np.asarray(table.rows_of(shard)) for shard in shards])
    sample = rows[np.unique(np.linspace(0, len(rows) - 1, SAMPLE).astype(int))]
    if len(sample) < 2:
        return None
    statistics = measure_statistics(table.vectors(sample))
    if keep:
        table.store.write_json(_STATISTICS, asdict(statistics))
    return statistics
