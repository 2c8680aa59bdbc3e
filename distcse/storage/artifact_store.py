"""`ArtifactStore`: a location in which a run keeps files and folders, on a disk (`FolderStore`) or in object storage.

All computation works on local files below `ArtifactStore.path`. In a bucket, that path is the location's local *mirror*: files
are written to the mirror, then uploaded, and downloaded where they are missing. In a folder, uploads and downloads do nothing.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

from distcse.errors import RunRecordError
from distcse.storage.atomic_files import atomic_folder, atomic_write, storage_errors
from distcse.storage.checksums import dump_checked_json, load_checked_json

_LOG = logging.getLogger(__name__)


class Guard(Protocol):
    """Permits changes of a location: the lease of a run's start. Its errors prevent the change."""

    def check(self) -> None:
        """Check it where the location is stored."""

    def check_here(self) -> None:
        """Check it without a request to object storage, before a change of this machine's files."""


@dataclass(frozen=True)
class ArtifactStore(ABC):
    """A location: `store / "model"` is a location below it, and `str(store)` its address.

    Methods with a name act on one file of the location. The others act on the location as a folder, which is stored as a unit:
    readers see all of its files, with verified checksums, or none.
    """

    path: Path
    """The local folder: the location itself, or its mirror on this machine."""
    guard: Guard | None = field(default=None, compare=False, repr=False)
    """Asked immediately before each change; also by the locations below."""

    def __truediv__(self, name: str) -> Self:
        return type(self)(self.path / name, self.guard)

    def __str__(self) -> str:
        return self.uri

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.path.name

    @property
    def parent(self) -> Self:
        """The location that contains this one."""
        return type(self)(self.path.parent, self.guard)

    @property
    @abstractmethod
    def uri(self) -> str:
        """The address, for messages and records: a path, `s3://…` or `gs://…`."""

    @property
    @abstractmethod
    def is_remote(self) -> bool:
        """Whether the location is in object storage."""

    # One file

    @contextmanager
    def write(self, name: str) -> Iterator[Path]:
        """Yield a temporary file to write; on success, it becomes the file `name`, and is stored.

        Folders between the location and the file are created. If writing fails, the file remains as it was.
        """
        self._create_parents(name)
        with atomic_write(self.path / name, self._check_here) as temporary:
            yield temporary
        self.upload(name)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file as `write` does."""
        with self.write(name) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def write_part(self, name: str, text: str) -> None:
        """Write a local text file of the folder as `write` does; `publish` stores it with the other files."""
        self._create_parents(name)
        with atomic_write(self.path / name, self._check_here) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def append_line(self, name: str, line: str) -> None:
        """Append a line to a local text file, which only `upload` stores. A crash may leave a part of the line."""
        self._check_here()
        with storage_errors(self.path / name), open(self.path / name, "ab+") as opened:
            begin = "" if _ends_with_newline(opened) else "\n"
            opened.write(f"{begin}{line}\n".encode())

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file with its own checksum as `write` does."""
        self.write_text(name, dump_checked_json(content))

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Fetch a file that `write_json` wrote, and read it; None if it does not exist."""
        return load_checked_json(self.path / name) if self.fetch(name) else None

    @abstractmethod
    def upload(self, name: str) -> None:
        """Store a local file that was written without `write`."""

    @abstractmethod
    def fetch(self, name: str) -> bool:
        """Make a stored file available as a local one, and return whether it exists."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return a stored file's content, without changing a local mirror; None if it does not exist."""

    # The location as a folder

    def write_folder(self, is_complete: Callable[[], bool] | None = None) -> AbstractContextManager[Path]:
        """Yield a temporary folder to fill, which then becomes the local folder (see `atomic_folder`). `publish` stores it."""
        return atomic_folder(self.path, is_complete, self._check_here)

    @abstractmethod
    def publish(self, files: Mapping[str, Path] | None = None, is_new: bool = False) -> None:
        """Store the local folder, or these files by name, as a unit, and wait until it is stored.

        `is_new` also stores the files that the stored folder has by its record, as it may be damaged.
        """

    @abstractmethod
    def fetch_folder(self, into: Path | None = None) -> bool:
        """Make the stored folder available locally, and return whether it exists.

        Processes of one machine download one after the other: into the mirror, whose other files are removed, or into a folder.

        """

    def fetch_cached(self) -> bool:
        """Fetch a folder that can be made again as `fetch_folder` does. `publish` with `is_new` replaces a damaged one."""
        try:
            return self.fetch_folder()
        except RunRecordError as damaged:
            _LOG.warning("%s is made again: %s", self, damaged)
            return False

    @abstractmethod
    def has_folder(self) -> bool:
        """Return whether the folder is stored, without downloading it."""

    @abstractmethod
    def keep_only(self, names: Collection[str]) -> None:
        """Delete all files of the folder that `publish` stored except some. Readers see all of the others, or none."""

    @abstractmethod
    def delete_folder(self) -> None:
        """Delete the folder that `publish` stored, and its local files."""

    @abstractmethod
    def delete_all(self) -> None:
        """Delete everything below the location, records before the files that they reference, and all local files."""

    @abstractmethod
    def list_names(self) -> set[str]:
        """List the names in the location. A listing of object storage may be outdated."""

    @abstractmethod
    def probe(self) -> None:
        """Check that the location can be used: write a small file, read it and delete it."""

    def _check(self) -> None:
        if self.guard is not None:
            self.guard.check()

    def _check_here(self) -> None:
        if self.guard is not None:
            self.guard.check_here()

    @abstractmethod
    def _create_parents(self, name: str) -> None:
        """Create the local folders between the location and a file."""


def _ends_with_newline(file: BinaryIO) -> bool:
    """Return whether a file is empty or its last line is complete."""
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


class FolderStore(ArtifactStore):
    """A folder. Its files are local already, so that nothing is uploaded or downloaded."""

    @property
    def uri(self) -> str:
        return str(self.path)

    @property
    def is_remote(self) -> bool:
        return False

    def upload(self, name: str) -> None:
        """Do nothing."""

    def fetch(self, name: str) -> bool:
        return os.path.isfile(self.path / name)  # Path.is_file raises for names that are too long

    def read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def publish(self, files: Mapping[str, Path] | None = None, is_new: bool = False) -> None:
        """Do nothing."""

    def fetch_folder(self, into: Path | None = None) -> bool:
        return self.path.is_dir()

    def has_folder(self) -> bool:
        return self.path.is_dir()

    def keep_only(self, names: Collection[str]) -> None:
        with storage_errors(self.path):
            for file in self.path.rglob("*"):
                if file.is_file() and file.relative_to(self.path).as_posix() not in names:
                    self._check()
                    file.unlink()

    def delete_folder(self) -> None:
        self._check()
        shutil.rmtree(self.path, ignore_errors=True)

    def delete_all(self) -> None:
        self._check()
        shutil.rmtree(self.path, ignore_errors=True)

    def list_names(self) -> set[str]:
        return {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()

    def probe(self) -> None:
        token = secrets.token_hex(6)
        temporary, target = self.path / f".distcse-probe.{token}.part", self.path / f".distcse-probe.{token}"
        try:
            with open(temporary, "xb") as file:
                file.write(b"distcse")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            if target.read_bytes() != b"distcse":
                raise OSError("the content read differs from the content written")
        finally:
            for remaining in (temporary, target):
                with suppress(OSError):  # if writing failed, there is no file to delete
                    remaining.unlink(missing_ok=True)

    def _create_parents(self, name: str) -> None:
        # The location itself is not created: writing into a deleted run directory is an error.
        with storage_errors(self.path / name):
            for folder in reversed(Path(name).parents[:-1]):
                (self.path / folder).mkdir(exist_ok=True)
