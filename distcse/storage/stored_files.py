"""Files that are read at offsets where they are stored, without a local copy."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path


class StoredFile(ABC):
    """A file on a disk or in object storage, which several threads may read at the same time."""

    size_bytes: int

    @abstractmethod
    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from `offset`; fewer at the end of the file.

        Raises:
            OSError: The disk cannot be read.
            ObjectStorageError: The object storage refuses the request.
        """


class LocalFile(StoredFile):
    """A file of a folder, on a local disk or on one that machines share.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: It does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with the last reference
        self.size_bytes = os.fstat(self._file.fileno()).st_size

    def read(self, offset: int, count: int) -> bytes:
        parts, missing = [], count
        # One call returns less than 2 GiB, and on some file systems less than it was asked for.
        while missing and (part := os.pread(self._file.fileno(), missing, offset + count - missing)):
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)
