"""The rows of a corpus without some of them, in memory that does not grow with the corpus."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


class RowSet:
    """The row ids from 0 to n - 1 without k of them, in ascending order.

    Args:
        rows: n, the rows of the corpus.
        without: (k,) row ids that are left out, ascending. Default: none.
    """

    def __init__(self, rows: int, without: NDArray[np.int64] | None = None) -> None:
        self._rows = rows
        self._without = np.empty(0, dtype=np.int64) if without is None else without
        self._shifts_at = self._without - np.arange(len(self._without))
        """(k,) positions from which on ids are larger by one more."""

    def __len__(self) -> int:
        return self._rows - len(self._without)

    def take(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the (m,) row ids at (m,) positions, each from 0 to n - k - 1."""
        found: NDArray[np.int64] = positions + np.searchsorted(self._shifts_at, positions, side="right")
        return found

    def blocks(self, size: int) -> Iterator[NDArray[np.int64]]:
        """Yield all row ids in blocks of a size; the last may be smaller."""
        for begin in range(0, len(self), size):
            yield self.take(np.arange(begin, min(begin + size, len(self))))

    def ids(self) -> NDArray[np.int64]:
        """Return all n - k row ids, in 8 bytes each."""
        return self.take(np.arange(len(self)))

    def split(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], RowSet]:
        """Return the (m,) row ids at ascending positions, and the set of the others."""
        taken = self.take(positions)
        return taken, RowSet(self._rows, np.sort(np.concatenate([self._without, taken])))
