"""Memory-mapped rows of different lengths: one file of concatenated values, one of offsets. Also the cache folder around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distcse.errors import CorpusCacheError, StorageWriteError
from distcse.storage import ArtifactStore, checksum, dump_checked_json, load_checked_json

VALUES, OFFSETS = "values.bin", "offsets.npy"
_BLOCK = 65_536
"""Rows that are copied at once."""

RowIds = Iterable[int] | NDArray[np.int64]


class RaggedWriter:
    """Streams rows into a folder; its memory does not grow with the rows."""

    def __init__(self, folder: Path) -> None:
        self._rows, self._last = 0, 0
        with ExitStack() as files:
            self._values = files.enter_context(open(folder / VALUES, "wb"))
            self._offsets = files.enter_context(open(folder / OFFSETS, "wb"))
            self._write_header()
            self._offsets.write(np.zeros(1, dtype=np.int64).tobytes())
            self._files = files.pop_all()

    def append(self, values: bytes, lengths: Sequence[int]) -> None:
        """Add rows.

        Args:
            values: Bytes of the concatenated values.
            lengths: Number of values (not bytes) in each row.
        """
        self._values.write(values)
        offsets = self._last + np.cumsum(lengths, dtype=np.int64)
        self._offsets.write(offsets.tobytes())
        self._rows += len(offsets)
        self._last = int(offsets[-1]) if len(offsets) else self._last

    def append_rows(self, rows: Sequence[Sequence[int]], dtype: np.dtype[Any]) -> None:
        """Add at least one row of integers, stored as `dtype`."""
        values = np.concatenate([np.asarray(row, dtype=dtype) for row in rows])
        self.append(values.tobytes(), [len(row) for row in rows])

    def append_table(self, rows: RaggedRows) -> None:
        """Add all rows that another folder has, block by block."""
        for begin in range(0, len(rows), _BLOCK):
            end = min(begin + _BLOCK, len(rows))
            self.append(rows.joined(begin, end), rows.lengths(np.arange(begin, end)).tolist())

    def finish(self) -> int:
        """Write the offsets and return the number of rows."""
        self._offsets.seek(0)
        self._write_header()
        self.close()
        return self._rows

    def close(self) -> None:
        """Close both files, whether finished or not, and also if one cannot be written to its end."""
        self._files.close()

    def _write_header(self) -> None:
        """Write the header of `np.save`, which reserves space for any number of rows."""
        header = {"descr": np.dtype(np.int64).str, "fortran_order": False, "shape": (self._rows + 1,)}
        np.lib.format.write_array_header_1_0(self._offsets, header)

    def __enter__(self) -> RaggedWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class RaggedRows:
    """Memory map of the rows that `RaggedWriter` wrote; all processes share the kernel's page cache."""

    def __init__(self, folder: Path, dtype: DTypeLike) -> None:
        # Plain arrays over the maps: slicing an np.memmap costs ten times as much as slicing an array.
        self._offsets: NDArray[np.int64] = np.asarray(np.load(folder / OFFSETS, mmap_mode="r", allow_pickle=False))
        count = int(self._offsets[-1])
        self._values: NDArray[Any] = np.asarray(
            np.memmap(folder / VALUES, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype=dtype)
        )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def rows(self, ids: RowIds) -> list[NDArray[Any]]:
        """Return the values of rows, in the order of the ids, as views into the map.

        Raises:
            IndexError: An id is negative, or not less than the number of rows.
        """
        first, last = self._bounds(ids)
        return [self._values[start:stop] for start, stop in zip(first.tolist(), last.tolist(), strict=True)]

    def joined(self, begin: int, end: int) -> bytes:
        """Return the bytes of the concatenated values of adjacent rows.

        Args:
            begin: The first row.
            end: One more than the last row.
        """
        return self._values[self._offsets[begin] : self._offsets[end]].tobytes()

    def lengths(self, ids: RowIds) -> NDArray[np.int64]:
        """Return the number of values in each row, without reading the values."""
        first, last = self._bounds(ids)
        return last - first

    def _bounds(self, ids: RowIds) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        indices = np.asarray(ids if isinstance(ids, np.ndarray | Sequence) else list(ids))
        if not indices.size:
            indices = indices.astype(np.int64)
        elif indices.min() < 0 or indices.max() >= len(self):  # numpy would count a negative id from the end
            raise IndexError(f"row ids {indices.min()} to {indices.max()}; allowed: 0 to {len(self) - 1}")
        return self._offsets[indices], self._offsets[indices + 1]


def load_verified_label(folder: Path, label: str) -> dict[str, Any] | None:
    """Load the label of a cached folder and verify the checksums of all its files.

    Reads every file, so call it once per run, on the driver. Workers call `fetch_label`.

    Returns:
        The label; None where a file is missing or changed, and the folder must be written again.
    """
    content = _load_label(folder, label)
    try:
        intact = content is not None and all(
            checksum(folder / name) == digest for name, digest in content["digests"].items()
        )
    except OSError:  # a file is missing, or the disk fails
        return None
    return content if intact else None


def find_cached(store: ArtifactStore, label: str) -> dict[str, Any] | None:
    """Fetch a cached folder from object storage, or upload it there if only this machine has it.

    Returns:
        The verified label; None where the folder must be written.
    """
    stored = store.fetch_cached()
    content = load_verified_label(store.path, label)
    if content is not None and not stored:
        store.publish(is_new=True)
    return content


def fetch_label(store: ArtifactStore, label: str, contents: str) -> dict[str, Any]:
    """Fetch a cached folder from object storage, and load its label.

    Args:
        store: The cached folder.
        label: Name of the label file in it.
        contents: What the folder contains, such as `corpus`, for the error message.

    Raises:
        CorpusCacheError: The folder is incomplete or damaged.
    """
    store.fetch_folder()
    content = _load_label(store.path, label)
    if content is None:
        raise CorpusCacheError(f"{store} contains no complete {contents}; restart the run to prepare it")
    return content


def _load_label(folder: Path, label: str) -> dict[str, Any] | None:
    """Load the label of a cached folder and verify the sizes of its files.

    Returns:
        The label; None where it is missing or damaged, or the sizes differ.
    """
    try:
        content = load_checked_json(folder / label)
        sizes = content.get("sizes")
        intact = sizes and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return None
    return content if intact and "digests" in content else None


@contextmanager
def write_cache_folder(
    store: ArtifactStore, label: str, key: str = "storage.cache"
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Create a cache folder atomically: it is written under a temporary name and renamed to the store's at the end.

    Several processes may write the same target, also from machines that share storage. The first to finish wins, and the
    folders of the others are deleted.

    Args:
        store: The folder.
        label: Name of the label file in it.
        key: The recipe's key of the location, for the error message. Default: that of the caches.

    Yields:
        The temporary folder, and the label's content, to be filled.

    Raises:
        CorpusCacheError: The cache folder cannot be written.
    """
    content: dict[str, Any] = {}
    try:
        with store.write_folder(lambda: load_verified_label(store.path, label) is not None) as temporary:
            yield temporary, content
            files = sorted(temporary.iterdir())
            content["sizes"] = {file.name: file.stat().st_size for file in files}
            content["digests"] = {file.name: checksum(file) for file in files}
            (temporary / label).write_text(dump_checked_json(content), encoding="utf-8")
    except StorageWriteError as error:
        cause = error.__cause__
        reason = getattr(cause, "strerror", None) or cause
        raise CorpusCacheError(
            f"folder {store.path.parent} cannot be written: {reason}; set {key} to another folder"
        ) from cause
    store.publish(is_new=True)
