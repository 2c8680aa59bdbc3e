"""The distinct sentences of a corpus with duplicates, numbered in the order of their first rows.

<cache>/distinct_rows/<fingerprint>/first.npy           (m,) int64, the first row of each distinct sentence, ascending
                                    numbers.npy         (n,) int64, the number of each row's sentence, 0 to m - 1
                                    distinct_rows.json  sizes and checksums of the files
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from distcse.data.ragged import fetch_label, find_cached, write_cache_folder
from distcse.data.row_keys import RowKeys

_LABEL, _FIRST, _NUMBERS = "distinct_rows.json", "first.npy", "numbers.npy"
_BLOCK = 2**20


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
    def prepare(cls, keys: RowKeys, fingerprint: str, cache: Path) -> DistinctRows:
        """Number the distinct sentences of a corpus, or reuse the numbers of a corpus with this fingerprint.

        Args:
            keys: The corpus's keys.
            fingerprint: The corpus's fingerprint.
            cache: Folder of the caches.

        Raises:
            CorpusCacheError: The cache cannot be written.
        """
        directory = _directory(fingerprint, cache)
        if find_cached(directory, _LABEL) is None:
            with write_cache_folder(directory, _LABEL) as (temporary, _):
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
        return cls(directory)

    @classmethod
    def open(cls, fingerprint: str, cache: Path) -> DistinctRows:
        """Open the numbers that `prepare` wrote.

        Raises:
            CorpusCacheError: The folder is incomplete or damaged.
        """
        directory = _directory(fingerprint, cache)
        fetch_label(directory, _LABEL, "numbers of distinct sentences")
        return cls(directory)


def _directory(fingerprint: str, cache: Path) -> Path:
    return cache / "distinct_rows" / fingerprint


def _blocks(rows: int) -> Iterator[slice]:
    for begin in range(0, rows, _BLOCK):
        yield slice(begin, min(begin + _BLOCK, rows))
