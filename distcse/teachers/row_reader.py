"""Reads single rows of a table's shards where they are stored, many at the same time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EmbeddingTableError
from distcse.storage import StoredFile

_PARALLEL = 32
"""Reads in flight. Storage with a latency of 10 ms then returns about 3,000 rows a second to a process."""
READ_BYTES = 16 * 2**20
"""Most bytes of a read. The reads in flight then hold 0.5 GiB, also where all rows of large shards are wanted."""
_ROW_TYPE = np.dtype(np.float16)


class _Run(NamedTuple):
    """Adjacent rows of one shard, which one read returns."""

    shard: int
    first: int
    """Number of the first row within the shard."""
    begin: int
    """Index of the first row in the result."""
    end: int


class RowReader:
    """Reads rows of shards at their offsets. Adjacent rows are one read.

    Args:
        name: The table's address, for messages.
        open_shard: Opens a shard's file of float16 rows, which follow a header.
        rows_of: Number of rows of a shard.
        shard_rows: Rows of every shard but the last.
        dimension: Numbers in a row.
        max_open: Shards that are kept open.
    """

    def __init__(
        self,
        name: str,
        open_shard: Callable[[int], StoredFile],
        rows_of: Callable[[int], int],
        shard_rows: int,
        dimension: int,
        max_open: int,
    ) -> None:
        self._name = name
        self._open_shard, self._rows_of = open_shard, rows_of
        self._shard_rows, self._dimension, self._max_open = shard_rows, dimension, max_open
        self._row_bytes = dimension * _ROW_TYPE.itemsize
        self._opened: OrderedDict[int, StoredFile] = OrderedDict()
        self._lock = Lock()

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.float16]:
        """Return the (n, d) rows with n numbers, in any order and with repetitions.

        Raises:
            EmbeddingTableError: A shard is missing, too short, or cannot be read.
            ObjectStorageError: The object storage refuses a request.
        """
        is_ascending = bool((np.diff(numbers) > 0).all())
        distinct, positions = (numbers, None) if is_ascending else np.unique(numbers, return_inverse=True)
        found = np.empty((len(distinct), self._dimension), dtype=_ROW_TYPE)

        def read_run(run: _Run) -> None:
            found[run.begin : run.end] = self._read_run(run)

        for _ in self._threads.map(read_run, self._runs(distinct)):  # raises the first error
            pass
        return found if positions is None else found[positions]

    def _runs(self, numbers: NDArray[np.int64]) -> list[_Run]:
        """Join ascending distinct numbers to runs within a shard, each of at most 16 MiB."""
        most = max(1, READ_BYTES // self._row_bytes)
        shards = numbers // self._shard_rows
        begins = np.flatnonzero((np.diff(numbers) > 1) | (np.diff(shards) > 0)) + 1
        bounds = [0, *begins.tolist(), len(numbers)]
        return [
            _Run(int(shards[part]), int(numbers[part] % self._shard_rows), part, min(part + most, end))
            for begin, end in pairwise(bounds)
            for part in range(begin, end, most)
        ]

    def _read_run(self, run: _Run) -> NDArray[np.float16]:
        size = (run.end - run.begin) * self._row_bytes
        try:
            file = self._file(run.shard)
            header = file.size_bytes - self._rows_of(run.shard) * self._row_bytes
            content = file.read(header + run.first * self._row_bytes, size) if header > 0 else b""
        except OSError as error:
            raise self._damaged(run.shard, str(error)) from None
        if len(content) != size:
            raise self._damaged(run.shard, "it is too short")
        return np.frombuffer(content, dtype=_ROW_TYPE).reshape(-1, self._dimension)

    def _file(self, shard: int) -> StoredFile:
        """Return a shard's open file. The one that was used longest ago is closed if too many are open."""
        with self._lock:
            if shard in self._opened:
                self._opened.move_to_end(shard)
                return self._opened[shard]
        file = self._open_shard(shard)  # outside of the lock: in object storage, it takes requests
        with self._lock:
            self._opened[shard] = file
            if len(self._opened) > self._max_open:
                self._opened.popitem(last=False)
        return file

    def _damaged(self, shard: int, reason: str) -> EmbeddingTableError:
        return EmbeddingTableError(
            f"{self._name} shard {shard} cannot be read ({reason}); start the run again to embed the shard again"
        )

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=_PARALLEL, thread_name_prefix="rows")
