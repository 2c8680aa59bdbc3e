"""Files and folders that are there whole or not at all, whatever is killed while they are written; and their checksums.

In this order, always: write beside, flush the content, rename, flush the folder. A rename within a folder is atomic, so a
reader meets the old file or the new one. Without the first flush a power cut may keep the rename and lose the content, which
is a file of zeros under a good name; without the second it may keep neither, although the run went on believing in both.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from distcse.errors import StorageWriteError

_SEAL = "blake2b"
_CHECKSUM_LINE = re.compile(r"# blake2b ([0-9a-f]{32}) of the lines above\n\Z")


@contextmanager
def storage_errors(place: Path) -> Iterator[None]:
    """Around what writes: storage that refuses is told as `StorageError`, with the place and the reason."""
    try:
        yield
    except (OSError, SafetensorError) as refused:
        told = " ".join(str(refused).split())
        # numpy says how much of an array was written, and not why.
        reason = (refused.strerror or f"{told}; is the disk full?") if isinstance(refused, OSError) else told
        raise StorageWriteError(
            f"{place} cannot be written: {reason}; what was there before is whole. Make room, or name other storage, then "
            "go on (a run: --resume)"
        ) from refused


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """A path beside a file, to be written; at the end it is flushed to the disk and takes the file's place.

    Where writing fails, the file stays as it was. Writers on several machines do not meet: the last one's content stays.

    Raises:
        StorageError: The disk is full, read-only or failing.
    """
    beside = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(2)}")
    try:
        with storage_errors(file):
            yield beside
            fsync(beside)
            os.replace(beside, file)
            fsync(file.parent)
    finally:
        with suppress(OSError):  # a disk that failed above is told of above
            beside.unlink(missing_ok=True)


def write_text_atomic(file: Path, text: str) -> None:
    """Write a text file, whole."""
    with atomic_write(file) as beside:
        beside.write_text(text, encoding="utf-8")


def fsync(place: Path) -> None:
    """Put a file's content, or the names in a folder, on the disk."""
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not place.is_dir():  # some network file systems have no flush of folders; of files all have
            raise
    finally:
        os.close(handle)


def fsync_all(folder: Path) -> None:
    """Put all files of a folder on the disk, and their names: before the folder gets its own."""
    for place in folder.rglob("*"):
        fsync(place)
    fsync(folder)


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
    fsync(folder.parent)


def checksum(file: Path) -> str:
    """Of a file's content: 32 hexadecimal digits of blake2b."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def text_checksum(text: str) -> str:
    """Of a text, as `checksum` would have it of a file."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def add_checksum_line(text: str) -> str:
    """A text with a last line, a comment in YAML, that has the checksum of the lines above it."""
    return f"{text}# blake2b {text_checksum(text)} of the lines above\n"


def without_checksum_line(text: str) -> str | None:
    """The lines above the checksum; None where there is none, or the lines are not those it was made of."""
    found = _CHECKSUM_LINE.search(text)
    if found is None or text_checksum(text[: found.start()]) != found[1]:
        return None
    return text[: found.start()]


def dump_checked_json(content: Mapping[str, Any]) -> str:
    """An object as JSON that knows its own checksum: a changed digit is still JSON."""
    plain = json.loads(json.dumps(content))
    return json.dumps({**plain, _SEAL: _seal(plain)}, indent=1)


def load_checked_json(file: Path) -> dict[str, Any]:
    """What `dump_checked_json` put into a file.

    Raises:
        OSError: It is not there.
        ValueError: It is not what was written.
    """
    return load_checked_json_bytes(file.read_bytes())


def load_checked_json_bytes(stored: bytes) -> dict[str, Any]:
    """What `dump_checked_json` made. Raises `ValueError` where it is not what was written."""
    content = json.loads(stored)
    if not isinstance(content, dict) or content.pop(_SEAL, None) != _seal(content):
        raise ValueError("its checksum differs")
    return content


def _seal(content: Mapping[str, Any]) -> str:
    return text_checksum(json.dumps(content, sort_keys=True))
