"""Storage that refuses writes: full and read-only file systems if this machine can mount them, else a limit on file sizes.

`before_change` runs code immediately before the n-th write or delete in a folder, whichever function makes it; `killed_before`
ends the writer there.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

KINDS = ("full", "read-only", "limited")


class Disk:
    """A folder whose storage can refuse writes."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.kind = kind

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Context manager: refuse files of more than 4 KiB, or all writes for the kind `read-only`.

        A module imported meanwhile isn't cached: Python would keep the first 4 KiB, and no later process could import it.
        """
        if self.kind == "limited":
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            caches = sys.dont_write_bytecode
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            sys.dont_write_bytecode = True
            try:
                yield
            finally:
                sys.dont_write_bytecode = caches
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        elif self.kind == "read-only":
            _run("mount", "-o", "remount,ro", str(self.path))
            try:
                yield
            finally:
                _run("mount", "-o", "remount,rw", str(self.path))
        else:
            filler = self.path / "filling"
            with pytest.raises(OSError, match="No space left"), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            try:
                yield
            finally:
                filler.unlink()


@contextmanager
def disk(path: Path, kind: str) -> Iterator[Disk]:
    """Create a disk at `path`; a separate one has 32 MiB."""
    path.mkdir()
    if kind == "limited":
        yield Disk(path, kind)
        return
    if not _run("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(path)):
        pytest.skip("this machine does not allow mounts; only the kind `limited` is tested")
    try:
        yield Disk(path, kind)
    finally:
        _run("umount", "-l", str(path))


_CHANGES = {
    "os.rename": 1,
    "os.remove": 0,
    "os.rmdir": 0,
    "os.mkdir": 0,
    "os.truncate": 0,
    "os.utime": 0,
    "shutil.rmtree": 0,
}
"""Audit events of Python that change a file system, and which of their arguments is the path."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_listeners: list[Callable[[str], None]] = []
_is_hooked: list[bool] = []
"""Not empty once the hook is set, which no process can remove."""


@contextmanager
def before_change(
    folder: Path, number: int, act: Callable[[], object], from_then_on: bool = False
) -> Iterator[list[str]]:
    """Context manager: call `act` immediately before this process's change of this number below a folder, the first being 1.

    Args:
        folder: The folder.
        number: Which change; 0 only lists them.
        act: Its own changes are neither counted nor listed. An error that it raises is raised by the change.
        from_then_on: Whether to call it before all later changes too. Default: before the one alone.

    Yields:
        The changes until now, as `<event> <file>`.
    """
    changes: list[str] = []

    def listen(change: str) -> None:
        event, _, path = change.partition(" ")
        if not Path(path).is_relative_to(folder):
            return
        changes.append(f"{event} {Path(path).relative_to(folder)}")
        if len(changes) == number or (from_then_on and 0 < number < len(changes)):
            _listeners.remove(listen)
            try:
                act()
            finally:
                _listeners.append(listen)

    if not _is_hooked:
        sys.addaudithook(_audit)
        _is_hooked.append(True)
    _listeners.append(listen)
    try:
        yield changes
    finally:
        _listeners.remove(listen)


class Killed(BaseException):
    """Ends a writer as SIGKILL does: no clause for errors catches it, and each later change raises it again."""


def kill() -> None:
    raise Killed


@contextmanager
def killed_before(folder: Path, number: int) -> Iterator[list[str]]:
    """Context manager: end the block as SIGKILL does, before its change of this number below a folder; 0 only lists them."""
    with suppress(Killed), before_change(folder, number, kill, from_then_on=True) as changes:
        yield changes


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _listeners:
        return
    is_change = arguments[2] & _WRITES if event == "open" and isinstance(arguments[2], int) else event in _CHANGES
    if is_change and isinstance(path := arguments[_CHANGES.get(event, 0)], str | os.PathLike):
        for listen in list(_listeners):
            listen(f"{event} {os.fspath(path)}")


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
