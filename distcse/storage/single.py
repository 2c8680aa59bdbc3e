"""Single files, each an object of its own: written here and put there, fetched before they are read."""

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
    """As `files.atomic_write`; what is a mirror is uploaded when it is whole, and has its folders made."""
    _make_room(file)
    with files.atomic_write(file) as beside:
        yield beside
    upload(file)


def write_text_atomic(file: Path, text: str) -> None:
    """Write a text file, whole, wherever it is kept."""
    with atomic_write(file) as beside:
        beside.write_text(text, encoding="utf-8")


def upload(file: Path) -> None:
    """Put what a mirror's file holds now where it is kept; elsewhere it is there already.

    Raises:
        StorageError: The storage refuses.
    """
    if isinstance(file, RemotePath):
        objects.write(to_uri(file), file)


def fetch(file: Path) -> bool:
    """Make a mirror's file what is stored; whether there is something. The file of a folder is, or is not, there."""
    if not isinstance(file, RemotePath):
        return os.path.isfile(file)  # Path.is_file raises for a name that is too long
    content = objects.read(to_uri(file))
    if content is None:
        return False
    _make_room(file)
    with files.atomic_write(file) as beside:
        beside.write_bytes(content)
    return True


def read(file: Path) -> bytes | None:
    """What is stored of a file, its mirror left as it is; None where there is nothing."""
    if isinstance(file, RemotePath):
        return objects.read(to_uri(file))
    return file.read_bytes() if file.exists() else None


def names(folder: Path) -> set[str]:
    """Names of what is in a folder, as the storage lists them."""
    if isinstance(folder, RemotePath):
        above = f"{to_uri(folder)}/"
        return {name.removeprefix(above).partition("/")[0] for name in objects.listed(to_uri(folder))}
    return {inside.name for inside in folder.iterdir()} if folder.is_dir() else set()


def _make_room(file: Path) -> None:
    """Each machine has mirrors of its own: what one has made, the others have not."""
    if isinstance(file, RemotePath):
        with storage_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
