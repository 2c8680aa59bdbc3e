"""Upload and download single files, one object per file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distcse import files
from distcse.files import storage_errors
from distcse.storage import objects
from distcse.storage.places import RemotePath, to_uri


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Write a file as `files.atomic_write` does; a mirror's file is uploaded at the end, and its folders are created.

    Raises:
        StorageError: The disk or the storage refuses the file.
    """
    _create_parent(file)
    with files.atomic_write(file) as temporary:
        yield temporary
    upload(file)


def write_text_atomic(file: Path, text: str) -> None:
    """Write a text file atomically, to a disk or to object storage.

    Raises:
        StorageError: The disk or the storage refuses the file.
    """
    with atomic_write(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def upload(file: Path) -> None:
    """Upload a mirror's file; does nothing for other files.

    Raises:
        ObjectStorageError: The storage refuses the file.
    """
    if isinstance(file, RemotePath):
        objects.write(to_uri(file), file)


def fetch(file: Path) -> bool:
    """Download a file to its mirror; return whether it exists. A file that has no mirror is not changed."""
    if not isinstance(file, RemotePath):
        return os.path.isfile(file)  # Path.is_file raises for names that are too long
    content = objects.read(to_uri(file))
    if content is None:
        return False
    _create_parent(file)
    with files.atomic_write(file) as temporary:
        temporary.write_bytes(content)
    return True


def read(file: Path) -> bytes | None:
    """Return a file's stored content, without changing its mirror; None if it does not exist."""
    if isinstance(file, RemotePath):
        return objects.read(to_uri(file))
    return file.read_bytes() if file.exists() else None


def list_names(folder: Path) -> set[str]:
    """List the names in a folder; a listing of object storage may be outdated."""
    if isinstance(folder, RemotePath):
        prefix = f"{to_uri(folder)}/"
        return {name.removeprefix(prefix).partition("/")[0] for name in objects.list_uris(to_uri(folder))}
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def _create_parent(file: Path) -> None:
    """Create the folder of a mirror's file, which may exist on other machines only."""
    if isinstance(file, RemotePath):
        with storage_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
