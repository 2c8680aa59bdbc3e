"""Write files and folders of this machine atomically, so that a crash never leaves a partial one.

The order is always: write under a temporary name in the same folder, fsync, rename, fsync the folder. A rename within a
folder is atomic, so readers see the old content or the new one. Without the first fsync, a power failure could keep the rename
and lose the content. Without the second, it could lose the rename, although the run relied on it.

The umask decides who can read them, also where a library sets other modes: safetensors closes its files to all
other users, and a copy has its source's mode.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE

from safetensors import SafetensorError

from distcse.errors import StorageWriteError

_TEMPORARY = re.compile(r"\..+\.\d+\.[0-9a-f]{4}")


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Convert an error of the code that writes to a path into a `StorageWriteError`."""
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
def atomic_write(file: Path, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield the path of a temporary file to write; on success, flush it to the disk and rename it to `file`.

    If writing fails, the file remains as it was, also if `check`, which is called immediately before the rename, raises. Of
    several concurrent writers the last one wins.

    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(2)}")
    try:
        with storage_errors(file):
            temporary.touch(exist_ok=False)
            created = temporary.stat()
            yield temporary
            if temporary.stat().st_ino != created.st_ino:  # a library renamed its own temporary file
                _set_mode(temporary, created.st_mode)
            _fsync(temporary)
            check()
            os.replace(temporary, file)
            _fsync(file.parent)
    finally:
        with suppress(OSError):  # a failing disk has already raised above
            temporary.unlink(missing_ok=True)


def move_atomic(complete: Path, file: Path) -> None:
    """Flush a complete file to the disk and rename it to another name in its folder."""
    with storage_errors(file):
        _fsync(complete)
        os.replace(complete, file)
        _fsync(file.parent)


def is_temporary(name: str) -> bool:
    """Return whether `atomic_write` writes to a file of this name, or was killed while it did."""
    return _TEMPORARY.fullmatch(name) is not None


def write_text_atomic(file: Path, text: str) -> None:
    """Write a text file of this machine atomically."""
    with atomic_write(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(
    target: Path, is_complete: Callable[[], bool] | None = None, check: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """Yield a temporary folder to fill; on success, flush its files to the disk and rename it to `target`.

    If writing fails, the target remains as it was. An existing target is replaced, unless it `is_complete`: then the new folder
    is discarded, because other processes may have opened the target's files.

    """
    # A random name, because containers that share storage often all have process id 1.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    try:
        with storage_errors(target):
            temporary.mkdir(parents=True)
            mode = temporary.stat().st_mode
            yield temporary
            for path in (*temporary.rglob("*"), temporary):
                _set_mode(path, mode)
                _fsync(path)
            check()
            _move(temporary, target, is_complete)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move(temporary: Path, target: Path, is_complete: Callable[[], bool] | None) -> None:
    try:
        os.replace(temporary, target)
    except OSError:
        if not os.path.lexists(target):
            raise
        if is_complete is not None and is_complete():
            return
        # A rename cannot replace a folder that has files, so the old one is renamed first. After a kill between the two renames,
        # the resumed run writes the folder again.
        old = temporary.with_name(f"{temporary.name}.old")
        os.replace(target, old)
        try:
            os.replace(temporary, target)
        except OSError:
            os.replace(old, target)
            raise
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink(missing_ok=True)
    _fsync(target.parent)


def _set_mode(path: Path, mode: int) -> None:
    """Give a file or folder the permissions to read and write of a mode, and a folder also those to enter."""
    mask, current = 0o777 if path.is_dir() else 0o666, path.stat().st_mode
    if (current ^ mode) & mask:
        path.chmod(S_IMODE(current) & ~mask | mode & mask)


def _fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some network file systems support fsync for files only
            raise
    finally:
        os.close(handle)
