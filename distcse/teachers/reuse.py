"""Reuse of an earlier table's vectors in the table of a corpus that has grown or was edited: only new sentences are embedded.

    <cache>/tables/<key>/reuse/rows.npy  (vectors,) int64, the earlier table's row for each vector, -1 for a new sentence

The folder exists while the table is embedded. Vectors are copied, bit by bit, so that every table can be removed by itself and
none changes while runs read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from distcse.errors import CorpusCacheError, EmbeddingTableError, ReusedTableError
from distcse.storage import ArtifactStore
from distcse.teachers.table import EmbeddingTable, StoredVectors
from distcse.text import Corpus
from distcse.text.row_keys import DistinctRows, RowKeys

_FOLDER, _FILE = "reuse", "rows.npy"
_BLOCK = 2**20


@dataclass(frozen=True)
class Reuse:
    """A new table's vectors that an earlier one has; small enough to send to an actor, which opens the earlier table."""

    rows: ArtifactStore
    """Folder of the (vectors,) rows of the earlier table, one for each vector of the new one; -1 for a new sentence."""
    source: EmbeddingTable
    """The earlier table."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Reuse, (self.rows, self.source)

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        self.rows.fetch_folder()
        return np.asarray(np.load(self.rows.path / _FILE, mmap_mode="r", allow_pickle=False))

    def is_stored(self, numbers: range) -> NDArray[np.bool_]:
        """Return whether the earlier table has each of the new table's vectors with these numbers."""
        return self._rows[numbers.start : numbers.stop] >= 0

    def read(self, numbers: range) -> StoredVectors | None:
        """Read those of the vectors with these numbers that the earlier table has; None if it has none.

        Raises:
            ReusedTableError: The earlier table was removed or damaged in the meantime.
        """
        is_stored = self.is_stored(numbers)
        if not is_stored.any():
            return None
        rows = self._rows[numbers.start : numbers.stop][is_stored]
        try:
            return StoredVectors(is_stored, self.source.stored_vectors(rows))
        except (EmbeddingTableError, CorpusCacheError) as lost:
            raise ReusedTableError(f"an earlier table is lost: {lost}") from lost


def find_reuse(
    table: EmbeddingTable, corpus: Corpus, cache: ArtifactStore, on_progress: Callable[[int], None] | None = None
) -> Reuse | None:
    """Find the table of the same teacher with most sentences of a corpus, and store which of its rows they are.

    Its shards that are missing or damaged are not used. Call it under the new table's lease.

    Returns:
        None if no table in `cache` has a sentence of the corpus.
    """
    keys = corpus.keys(cache)
    found = _find_source(table, keys, cache)
    if found is None:
        return None
    source, source_keys = found
    if source.identity.distinct is not None:
        # The table reads them, and they may be damaged.
        DistinctRows.prepare(source_keys, source.identity.corpus, cache)
    store = table.store / _FOLDER
    with store.write_folder() as temporary:
        rows = open_memmap(temporary / _FILE, mode="w+", dtype=np.int64, shape=(table.identity.vectors,))
        for own_rows, source_rows in keys.match(source_keys):
            rows[table.numbers_of(own_rows)] = source_rows
        has_rows = _drop_unusable(rows, source, on_progress)
        rows.flush()
    if not has_rows:
        store.delete_folder()
        return None
    store.publish()
    return Reuse(store, source)


def count_new_rows(table: EmbeddingTable, corpus: Corpus, cache: ArtifactStore) -> int:
    """Return how many rows must be embedded to complete a table: an estimate if an earlier table has more than a million."""
    missing = sum(len(table.shard_range(shard)) for shard in table.missing_shards())
    found = _find_source(table, keys := corpus.keys(cache), cache) if missing else None
    return missing if found is None else min(missing, max(0, len(corpus) - keys.count_common(found[1])))


def _find_source(table: EmbeddingTable, keys: RowKeys, cache: ArtifactStore) -> tuple[EmbeddingTable, RowKeys] | None:
    """Return the other table of the same teacher that has most of the keys' sentences, and its corpus's keys."""
    best, most = None, 0
    for other in EmbeddingTable.list_all(cache):
        if other.identity == table.identity or not other.identity.has_teacher_of(table.identity):
            continue
        other_keys = RowKeys.find(other.identity.corpus, cache)
        if other_keys is not None and (common := keys.count_common(other_keys)) > most:
            best, most = (other, other_keys), common
    return best


def _drop_unusable(rows: NDArray[np.int64], source: EmbeddingTable, on_progress: Callable[[int], None] | None) -> bool:
    """Replace rows of the source's missing or damaged shards by -1, and return whether others remain."""
    blocks = [slice(begin, begin + _BLOCK) for begin in range(0, len(rows), _BLOCK)]
    needed = {
        *chain.from_iterable(np.unique(source.shards_of(rows[block][rows[block] >= 0])).tolist() for block in blocks)
    }
    unusable = source.not_intact(sorted(needed), on_progress)
    for block in blocks if unusable else []:
        is_stored = rows[block] >= 0
        is_unusable = np.isin(source.shards_of(np.where(is_stored, rows[block], 0)), unusable)
        rows[block] = np.where(is_stored & is_unusable, -1, rows[block])
    return len(unusable) < len(needed)
