"""Equal sentences of a corpus and of two corpora, found by sorted 128-bit hashes, and the numbers of a corpus's distinct ones.

    <cache>/row_keys/<fingerprint>/keys.npy        (2, n) uint64, upper and lower halves of the hashes
                                   rows.npy        (n,) int64, the keys' row ids; those of equal sentences ascend
                                   row_keys.json   number of distinct sentences, sizes and checksums of the files

    <cache>/distinct_rows/<fingerprint>/first.npy           (m,) int64, the first row of each distinct sentence, ascending
                                        numbers.npy         (n,) int64, the number of each row's sentence, 0 to m - 1
                                        distinct_rows.json  sizes and checksums of the files

The files are memory-mapped and processed in ranges of keys, so that memory does not grow with rows. Hashes are uniform: a range
holds about the same share of every corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from distcse.events import CHUNK
from distcse.storage import ArtifactStore, text_hashes
from distcse.text.ragged import fetch_label, find_cached, write_cache_folder

_LABEL, _KEYS, _ROWS, _UNSORTED = "row_keys.json", "keys.npy", "rows.npy", "unsorted.bin"
_DISTINCT_LABEL, _FIRST, _NUMBERS = "distinct_rows.json", "first.npy", "numbers.npy"
RANGE_ROWS = 2**20
"""Rows of a range, at most about; a million rows' keys and ids take 24 MB."""

Texts = Callable[[range], list[str]]
"""Returns the sentences of row ids."""


class RowKeys:
    """The sorted keys of n sentences.

    Args:
        directory: Folder that `prepare` wrote.
        label: Content of its label file.
    """

    def __init__(self, directory: Path, label: dict[str, Any]) -> None:
        self.distinct: int = label["distinct"]
        """Number of different sentences."""
        self._keys: NDArray[np.uint64] = np.load(directory / _KEYS, mmap_mode="r", allow_pickle=False)
        self._rows: NDArray[np.int64] = np.load(directory / _ROWS, mmap_mode="r", allow_pickle=False)

    @classmethod
    def prepare(cls, texts: Texts, rows: int, fingerprint: str, cache: ArtifactStore) -> RowKeys:
        """Hash and sort the sentences of a corpus, or reuse the keys of a corpus with this fingerprint.

        Args:
            texts: Returns the sentences of row ids.
            rows: Number of sentences n.
            fingerprint: The corpus's fingerprint.
            cache: Folder of the caches.

        Raises:
            CorpusCacheError: The cache cannot be written.
        """
        if (found := cls.find(fingerprint, cache)) is not None:
            return found
        directory = cache / "row_keys" / fingerprint
        with write_cache_folder(directory, _LABEL) as (temporary, label):
            unsorted = temporary / _UNSORTED
            bounds = np.concatenate([[0], np.cumsum(_write_hashes(texts, rows, unsorted))])
            keys = open_memmap(temporary / _KEYS, mode="w+", dtype=np.uint64, shape=(2, rows))
            ids = open_memmap(temporary / _ROWS, mode="w+", dtype=np.int64, shape=(rows,))
            _scatter(unsorted, bounds, keys, ids)
            unsorted.unlink()
            label.update(distinct=_sort_ranges(bounds, keys, ids))
            keys.flush()
            ids.flush()
        return cls(directory.path, label)

    @classmethod
    def find(cls, fingerprint: str, cache: ArtifactStore) -> RowKeys | None:
        """Return the keys of the corpus with this fingerprint; None if the cache has none that are intact."""
        directory = cache / "row_keys" / fingerprint
        label = find_cached(directory, _LABEL)
        return None if label is None else cls(directory.path, label)

    @classmethod
    def open(cls, fingerprint: str, cache: ArtifactStore) -> RowKeys:
        """Open the keys that `prepare` wrote, without reading all of their files.

        Raises:
            CorpusCacheError: The folder is incomplete.
        """
        directory = cache / "row_keys" / fingerprint
        return cls(directory.path, fetch_label(directory, _LABEL, "keys of sentences"))

    def __len__(self) -> int:
        return len(self._rows)

    def first_rows(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield, for ranges of keys, (k,) row ids and the (k,) ids of the first rows with the same sentences."""
        for begin, end in self._ranges(_ranges_of(len(self))):
            rows = self._rows[begin:end]
            starts, groups = _groups(self._keys[:, begin:end])
            yield rows, rows[starts][groups]

    def rows_of(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Return the row ids of all sentences that equal one of these texts, ascending."""
        upper, lower = np.frombuffer(text_hashes(texts), dtype="<u8").reshape(-1, 2).T
        begins, ends = (np.searchsorted(self._keys[0], upper, side=side) for side in ("left", "right"))
        found = [
            self._rows[begin:end][self._keys[1, begin:end] == half]
            for begin, end, half in zip(begins, ends, lower, strict=True)
        ]
        return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *found]))

    def match(self, other: RowKeys) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Find the sentences of this corpus in another one.

        Yields:
            For ranges of keys, (k,) row ids of this corpus, and (k,) ids of the first rows of the other corpus with the same
            sentences, -1 where it has none.
        """
        number = _ranges_of(max(len(self), len(other)))
        for own, others in zip(self._ranges(number), other._ranges(number), strict=True):
            yield self._match_range(own, other, others)

    def count_common(self, other: RowKeys) -> int:
        """Return how many of this corpus's sentences another one has: exact up to a million rows, else from a sample of them."""
        number = _ranges_of(max(len(self), len(other)))
        _, found = self._match_range(next(self._ranges(number)), other, next(other._ranges(number)))
        return int((found >= 0).sum()) * number

    def _match_range(
        self, own: tuple[int, int], other: RowKeys, others: tuple[int, int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows = self._rows[slice(*own)]
        upper, lower = self._keys[:, slice(*own)]
        other_upper, other_lower = other._keys[:, slice(*others)]
        if not len(other_upper):
            return rows, np.full(len(rows), -1, dtype=np.int64)
        # The first of the keys with the same upper half. If different sentences share it (n²/2⁶⁵), one may count as missing.
        indices = np.minimum(np.searchsorted(other_upper, upper), len(other_upper) - 1)
        is_equal = (other_upper[indices] == upper) & (other_lower[indices] == lower)
        return rows, np.where(is_equal, other._rows[slice(*others)][indices], -1)

    def _ranges(self, number: int) -> Iterator[tuple[int, int]]:
        """Divide the values of the upper halves into equal parts, a power of two, and yield the bounds of each part's keys."""
        limits = np.array([2**64 // number * each for each in range(1, number)], dtype=np.uint64)
        bounds = [0, *np.searchsorted(self._keys[0], limits).tolist(), len(self)]
        yield from pairwise(bounds)


class DistinctRows:
    """Which rows of a corpus have the same sentence.

    Args:
        directory: Folder that `prepare` wrote.
    """

    def __init__(self, directory: Path) -> None:
        self.first: NDArray[np.int64] = np.load(directory / _FIRST, mmap_mode="r", allow_pickle=False)
        """(m,) ids of the first rows of the distinct sentences, ascending; memory-mapped."""
        self.numbers: NDArray[np.int64] = np.load(directory / _NUMBERS, mmap_mode="r", allow_pickle=False)
        """(n,) numbers of the rows' sentences; memory-mapped."""

    @classmethod
    def prepare(cls, keys: RowKeys, fingerprint: str, cache: ArtifactStore) -> DistinctRows:
        """Number the distinct sentences of a corpus, or reuse the numbers of a corpus with this fingerprint.

        Args:
            keys: The corpus's keys.
            fingerprint: The corpus's fingerprint.
            cache: Folder of the caches.

        Raises:
            CorpusCacheError: The cache cannot be written.
        """
        directory = cache / "distinct_rows" / fingerprint
        if find_cached(directory, _DISTINCT_LABEL) is None:
            with write_cache_folder(directory, _DISTINCT_LABEL) as (temporary, _):
                numbers = open_memmap(temporary / _NUMBERS, mode="w+", dtype=np.int64, shape=(len(keys),))
                first = open_memmap(temporary / _FIRST, mode="w+", dtype=np.int64, shape=(keys.distinct,))
                for rows, first_rows in keys.first_rows():
                    numbers[rows] = first_rows
                written = 0
                for block in _blocks(len(keys)):
                    new = block.start + np.flatnonzero(numbers[block] == np.arange(block.start, block.stop))
                    first[written : written + len(new)] = new
                    written += len(new)
                for block in _blocks(len(keys)):
                    numbers[block] = np.searchsorted(first, numbers[block])
                numbers.flush()
                first.flush()
        return cls(directory.path)

    @classmethod
    def open(cls, fingerprint: str, cache: ArtifactStore) -> DistinctRows:
        """Open the numbers that `prepare` wrote.

        Raises:
            CorpusCacheError: The folder is incomplete or damaged.
        """
        directory = cache / "distinct_rows" / fingerprint
        fetch_label(directory, _DISTINCT_LABEL, "numbers of distinct sentences")
        return cls(directory.path)


def _ranges_of(rows: int) -> int:
    """Return the number of ranges for this many rows: a power of two."""
    return 1 << ((rows - 1) // RANGE_ROWS).bit_length()


def _write_hashes(texts: Texts, rows: int, file: Path) -> NDArray[np.int64]:
    """Write the sentences' hashes in the order of rows, and return how many are in each range."""
    number = _ranges_of(rows)
    counts = np.zeros(number, dtype=np.int64)
    with open(file, "wb") as out:
        for first in range(0, rows, CHUNK):
            hashes = text_hashes(texts(range(first, min(first + CHUNK, rows))))
            out.write(hashes)
            upper = np.frombuffer(hashes, dtype="<u8").reshape(-1, 2)[:, 0]
            counts += np.bincount(_range_numbers(upper, number), minlength=number)
    return counts


def _range_numbers(upper: NDArray[np.uint64], number: int) -> NDArray[np.int64]:
    bits = number.bit_length() - 1
    return ((upper >> np.uint64(32)) >> np.uint64(32 - bits)).astype(np.int64)


def _scatter(unsorted: Path, bounds: NDArray[np.int64], keys: NDArray[np.uint64], rows: NDArray[np.int64]) -> None:
    """Move each key and its row id into its range."""
    hashes = np.memmap(unsorted, dtype="<u8", mode="r").reshape(-1, 2)
    free = bounds[:-1].copy()
    for first in range(0, len(hashes), RANGE_ROWS):
        block = np.asarray(hashes[first : first + RANGE_ROWS])
        numbers = _range_numbers(block[:, 0], len(free))
        order = np.argsort(numbers, kind="stable")
        for indices in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            number = numbers[indices[0]]
            target = slice(free[number], free[number] + len(indices))
            keys[:, target] = block[indices].T
            rows[target] = first + indices
            free[number] += len(indices)


def _sort_ranges(bounds: NDArray[np.int64], keys: NDArray[np.uint64], rows: NDArray[np.int64]) -> int:
    """Sort the keys of each range, equal ones by row, and return the number of distinct keys."""
    distinct = 0
    for begin, end in pairwise(bounds.tolist()):
        # Stable, and the rows of a range ascend already.
        order = np.lexsort((keys[1, begin:end], keys[0, begin:end]))
        keys[:, begin:end] = keys[:, begin:end][:, order]
        rows[begin:end] = rows[begin:end][order]
        distinct += len(_groups(keys[:, begin:end])[0])
    return distinct


def _groups(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first indices of groups of equal keys, and the number of each key's group."""
    is_first = np.ones(keys.shape[1], dtype=bool)
    is_first[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    return np.flatnonzero(is_first), np.cumsum(is_first) - 1


def _blocks(rows: int) -> Iterator[slice]:
    for begin in range(0, rows, RANGE_ROWS):
        yield slice(begin, min(begin + RANGE_ROWS, rows))
