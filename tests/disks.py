"""Storage that refuses writes: full and read-only file systems if this machine can mount them, else a limit on file sizes."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KINDS = ("full", "read-only", "limited")


class Disk:
    """A folder whose storage can refuse writes."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.kind = kind

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Context manager: refuse files of more than 4 KiB, or all writes for the kind `read-only`."""
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


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
