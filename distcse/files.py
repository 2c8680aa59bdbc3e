"""Write files and folders atomically, so that a crash never leaves a partial one; compute and verify checksums.

The order is always: write a temporary file in the same folder, fsync it, rename it, fsync the folder. A rename within a
folder is atomic, so readers see the old file or the new one. Without the first fsync, a power failure could keep the rename
and lose the content. Without the second, it could lose the rename, although the run relied on it.
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

_CHECKSUM_KEY = "blake2b"
_CHECKSUM_LINE = re.compile(r"# blake2b ([0-9a-f]{32}) of the lines above\n\Z")


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Convert an error of the code that writes to a path into a `StorageWriteError`.

    Args:
        path: File or folder that is written; the message names it.

    Raises:
        StorageWriteError: The storage is full, read-only or failing.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        message = " ".join(str(error).split())
        # numpy's errors have no errno: they state how much of an array was written, not why it failed.
        reason = (error.strerror or f"{message}; is the disk full?") if isinstance(error, OSError) else message
        raise StorageWriteError(
            f"{path} cannot be written: {reason}; its previous content is intact. Free some space or use other storage, then "
            "continue (a run: --resume)"
        ) from error


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield the path of a temporary file to write; on success, flush it to the disk and rename it to `file`.

    If writing fails, the file remains as it was. Of several concurrent writers the last one wins.

    Raises:
        StorageWriteError: The disk is full, read-only or failing.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(2)}")
    try:
        with storage_errors(file):
            yield temporary
            fsync(temporary)
            os.replace(temporary, file)
            fsync(file.parent)
    finally:
        with suppress(OSError):  # a failing disk has already raised above
            temporary.unlink(missing_ok=True)


def write_text_atomic(file: Path, text: str) -> None:
    """Write a text file atomically.

    Raises:
        StorageWriteError: The disk is full, read-only or failing.
    """
    with atomic_write(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some network file systems support fsync for files only
            raise
    finally:
        os.close(handle)


def fsync_all(folder: Path) -> None:
    """Flush all files and folders below a folder, and the folder itself, to the disk."""
    for path in folder.rglob("*"):
        fsync(path)
    fsync(folder)


def move_into_place(temporary: Path, folder: Path, is_complete: Callable[[], bool]) -> None:
    """Rename a complete temporary folder to its final name, unless another process did so first.

    The first writer wins, because other processes may have opened its files.

    Args:
        temporary: The written folder, in the same parent folder.
        folder: Its final name.
        is_complete: Whether an existing folder with that name is complete; an incomplete one is replaced.
    """
    try:
        os.replace(temporary, folder)
    except OSError:
        if is_complete():
            return
        damaged = temporary.with_name(f"{temporary.name}.damaged")
        os.replace(folder, damaged)
        os.replace(temporary, folder)
        shutil.rmtree(damaged, ignore_errors=True)
    fsync(folder.parent)


def checksum(file: Path) -> str:
    """Compute the checksum of a file's content: 32 hexadecimal digits of BLAKE2b."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def text_checksum(text: str) -> str:
    """Compute the checksum of a text, equal to that of a file with this text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def add_checksum_line(text: str) -> str:
    """Append a line, a comment in YAML, with the checksum of the text."""
    return f"{text}# blake2b {text_checksum(text)} of the lines above\n"


def without_checksum_line(text: str) -> str | None:
    """Remove the checksum line; None if there is none, or the text was changed."""
    found = _CHECKSUM_LINE.search(text)
    if found is None or text_checksum(text[: found.start()]) != found[1]:
        return None
    return text[: found.start()]


def dump_checked_json(content: Mapping[str, Any]) -> str:
    """Serialize an object to JSON with its own checksum, so that `load_checked_json` detects changed values."""
    parsed = json.loads(json.dumps(content))
    return json.dumps({**parsed, _CHECKSUM_KEY: _json_checksum(parsed)}, indent=1)


def load_checked_json(file: Path) -> dict[str, Any]:
    """Read a file that `dump_checked_json` produced.

    Raises:
        OSError: The file does not exist or cannot be read.
        ValueError: It is not valid JSON, or its checksum differs.
    """
    return load_checked_json_bytes(file.read_bytes())


def load_checked_json_bytes(stored: bytes) -> dict[str, Any]:
    """Parse the output of `dump_checked_json`.

    Raises:
        ValueError: It is not valid JSON, or its checksum differs.
    """
    content = json.loads(stored)
    if not isinstance(content, dict) or content.pop(_CHECKSUM_KEY, None) != _json_checksum(content):
        raise ValueError("its checksum differs")
    return content


def _json_checksum(content: Mapping[str, Any]) -> str:
    return text_checksum(json.dumps(content, sort_keys=True))
