"""Rows of different length in two files: values one after the other, and where each row begins. Read by memory map."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

VALUES, OFFSETS = "values.bin", "offsets.npy"


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
        self._values.flush()
        os.fsync(self._values.fileno())
        self._values.close()
        lengths = np.concatenate(self._lengths) if self._lengths else np.empty(0, dtype=np.int64)
        np.save(self._folder / OFFSETS, np.concatenate([[0], np.cumsum(lengths)]))
        return len(lengths)


class RaggedRows:
    """Rows written by `RaggedWriter`, mapped: the kernel holds what is read, and all processes share it."""

    def __init__(self, folder: Path, dtype: DTypeLike) -> None:
        self.offsets: NDArray[np.int64] = np.load(folder / OFFSETS, mmap_mode="r", allow_pickle=False)
        count = int(self.offsets[-1])
        self._values: NDArray[Any] = (
            np.memmap(folder / VALUES, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype=dtype)
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, number: int) -> NDArray[Any]:
        """The values of one row."""
        return self._values[self.offsets[number] : self.offsets[number + 1]]


def is_whole(folder: Path, label: str, itemsize: int | None = None) -> dict[str, Any] | None:
    """The label of a cached folder whose files have the sizes it states, else None: it is to be made again."""
    try:
        described: dict[str, Any] = json.loads((folder / label).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in (VALUES, OFFSETS)}
    except (OSError, ValueError):  # absent or damaged: make it again
        return None
    return described if described.get("sizes") == sizes else None


@contextmanager
def making(target: Path, label: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A folder to write beside `target` and a label to fill; both move into place together when all went well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    described: dict[str, Any] = {}
    try:
        yield beside, described
        described["sizes"] = {name: (beside / name).stat().st_size for name in (VALUES, OFFSETS)}
        (beside / label).write_text(json.dumps(described, indent=2), encoding="utf-8")
        if is_whole(target, label) is None:
            shutil.rmtree(target, ignore_errors=True)
            try:
                os.replace(beside, target)
            except OSError:
                # Another process finished the same folder in between: its content is ours.
                if is_whole(target, label) is None:
                    raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
