"""Rows of different length in two files: values one after the other, and where each row begins. Read by memory map."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distcse.errors import CorpusCacheError
from distcse.files import checksum, dump_checked_json, fsync_all, load_checked_json, move_into_place
from distcse.storage import fetch_folder, upload_dir

VALUES, OFFSETS = "values.bin", "offsets.npy"

RowIds = Iterable[int] | NDArray[np.int64]


class RaggedWriter:
    """Appends rows to a folder; nothing is kept in memory but row lengths."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._values = open(folder / VALUES, "wb")  # noqa: SIM115 - closed by finish
        self._lengths: list[NDArray[np.int64]] = []

    def append(self, values: bytes, lengths: Sequence[int]) -> None:
        """Add rows: their values' bytes, and the length of each row in values."""
        self._values.write(values)
        self._lengths.append(np.asarray(lengths, dtype=np.int64))

    def finish(self) -> int:
        """Write the offsets; returns the number of rows."""
        self.close()
        lengths = np.concatenate([np.zeros(1, dtype=np.int64), *self._lengths])
        np.save(self._folder / OFFSETS, np.cumsum(lengths))
        return len(lengths) - 1

    def close(self) -> None:
        """Close the values' file, finished or not."""
        self._values.close()

    def __enter__(self) -> RaggedWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class RaggedRows:
    """Rows written by `RaggedWriter`, mapped: the kernel holds what is read, and all processes share it."""

    def __init__(self, folder: Path, dtype: DTypeLike) -> None:
        # Plain arrays over the maps: slicing a np.memmap costs ten times as much as slicing an array.
        self._offsets: NDArray[np.int64] = np.asarray(np.load(folder / OFFSETS, mmap_mode="r", allow_pickle=False))
        count = int(self._offsets[-1])
        self._values: NDArray[Any] = np.asarray(
            np.memmap(folder / VALUES, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype=dtype)
        )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def rows(self, ids: RowIds) -> list[NDArray[Any]]:
        """Values of rows, in the order of the ids; views into the map. `IndexError` for an id that is no row's."""
        first, last = self._bounds(ids)
        return [self._values[start:stop] for start, stop in zip(first.tolist(), last.tolist(), strict=True)]

    def lengths(self, ids: RowIds) -> NDArray[np.int64]:
        """Number of values in each of the rows, without reading them."""
        first, last = self._bounds(ids)
        return last - first

    def _bounds(self, ids: RowIds) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        wanted = np.asarray(ids if isinstance(ids, np.ndarray | Sequence) else list(ids))
        if not wanted.size:
            wanted = wanted.astype(np.int64)
        elif wanted.min() < 0 or wanted.max() >= len(self):  # numpy would count a negative id from the end
            raise IndexError(f"row ids {wanted.min()} to {wanted.max()}; there are rows 0 to {len(self) - 1}")
        return self._offsets[wanted], self._offsets[wanted + 1]


def is_whole(folder: Path, label: str) -> dict[str, Any] | None:
    """The label of a cached folder whose files are those that were written, to the last bit; else None: make it again.

    All files are read, so ask it once a run; a worker that opens what the driver has checked asks `labelled`.
    """
    described = labelled(folder, label)
    try:
        intact = described is not None and all(
            checksum(folder / name) == digest for name, digest in described["digests"].items()
        )
    except OSError:  # gone, or on a disk that fails
        return None
    return described if intact else None


def is_kept(folder: Path, label: str) -> dict[str, Any] | None:
    """As `is_whole`, of what is stored; what only this machine has whole is stored."""
    stored = fetch_folder(folder)
    described = is_whole(folder, label)
    if described is not None and not stored:
        upload_dir(folder)
    return described


def labelled(folder: Path, label: str) -> dict[str, Any] | None:
    """The label of a cached folder whose files have the sizes it states; None where it is absent, damaged or another."""
    try:
        described = load_checked_json(folder / label)
        sizes = _sizes(folder)
    except (OSError, ValueError):
        return None
    return described if described.get("sizes") == sizes and "digests" in described else None


@contextmanager
def making(target: Path, label: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A folder to write beside `target` and a label to fill; both move into place together when all went well.

    Two processes may make the same target, on one machine or on two that share storage: the first to finish wins, and
    the other's work is dropped. Raises `CorpusError` when the cache cannot be written.
    """
    # Not named by process id: containers that share storage often all run as process 1.
    beside = target.with_name(f".{target.name}.{uuid4().hex[:12]}")
    described: dict[str, Any] = {}
    try:
        beside.mkdir(parents=True)
        yield beside, described
        described["sizes"] = _sizes(beside)
        described["digests"] = {file.name: checksum(file) for file in sorted(beside.iterdir())}
        (beside / label).write_text(dump_checked_json(described), encoding="utf-8")
        fsync_all(beside)
        move_into_place(beside, target, lambda: is_whole(target, label) is not None)
        upload_dir(target)
    except OSError as refused:
        reason = refused.strerror or refused
        raise CorpusCacheError(
            f"cache folder {target.parent} cannot be written: {reason}; set storage.cache"
        ) from refused
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _sizes(folder: Path) -> dict[str, int]:
    return {name: (folder / name).stat().st_size for name in (VALUES, OFFSETS)}
