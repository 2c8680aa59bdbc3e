"""Storage that refuses: full and read-only file systems where this machine may mount them, and a limit on files where not."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KINDS = ("full", "read-only", "limited")


class Disk:
    """A folder whose storage can be made to refuse."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.kind = kind

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """While this holds, nothing of more than 4 KiB (of anything, where it is read-only) can be written."""
        if self.kind == "limited":
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        elif self.kind == "read-only":
            _run("mount", "-o", "remount,ro", str(self.path))
            try:
                yield
            finally:
                _run("mount", "-o", "remount,rw", str(self.path))
        else:
            filling = self.path / "filling"
            with pytest.raises(OSError, match="No space left"), open(filling, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            try:
                yield
            finally:
                filling.unlink()


@contextmanager
def disk(path: Path, kind: str) -> Iterator[Disk]:
    """A disk at `path`, which is made; 32 MiB where it is one of its own."""
    path.mkdir()
    if kind == "limited":
        yield Disk(path, kind)
        return
    if not _run("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(path)):
        pytest.skip("this machine does not let tests mount a file system; the kind `limited` runs without")
    try:
        yield Disk(path, kind)
    finally:
        _run("umount", "-l", str(path))


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
