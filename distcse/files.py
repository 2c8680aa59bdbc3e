"""Files that are there whole or not at all, whatever is killed while they are written."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
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
