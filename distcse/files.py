"""Files and folders that are there whole or not at all, whatever is killed while they are written; and their checksums."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """A path beside a file, to be written; at the end it is flushed to the disk and takes the file's place.

    Where writing fails, the file stays as it was. Writers on several machines do not meet: the last one's content stays.
    """
    beside = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(2)}")
    try:
        yield beside
        with open(beside, "rb") as written:
            os.fsync(written.fileno())
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def put(file: Path, text: str) -> None:
    """Write a text file, whole."""
    with whole(file) as beside:
        beside.write_text(text, encoding="utf-8")


def move_into_place(beside: Path, folder: Path, is_whole: Callable[[], bool]) -> None:
    """Give a folder that was written beside its name. The first of several writers wins: others may have opened its files.

    Args:
        beside: What was written.
        folder: Its name.
        is_whole: Whether what has the name already is whole; what is not is replaced.
    """
    try:
        os.replace(beside, folder)
    except OSError:
        if is_whole():
            return
        damaged = beside.with_name(f"{beside.name}.damaged")
        os.replace(folder, damaged)
        os.replace(beside, folder)
        shutil.rmtree(damaged, ignore_errors=True)


def checksum(file: Path) -> str:
    """Of a file's content: 32 hexadecimal digits of blake2b."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
