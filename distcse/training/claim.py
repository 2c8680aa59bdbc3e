"""Who may work in a folder: one start at a time, and nobody who still works for an earlier one.

Two things, because neither is enough:

- **Who is let in.** The claim names the process that works in the folder. Whoever comes later is refused, or waits, as long as
  that process lives. On one machine the kernel says so, at once also after SIGKILL: by the number of the process and the time it
  began, on this boot and in this namespace of processes. From another machine or container nobody can ask the kernel: there it
  lives as long as it touches the claim, and counts as lost when it has not for a minute.
- **Who may write.** A driver that is killed leaves its workers alive for seconds, on a shared cluster for longer, and a machine
  that was only cut off comes back. Each start has a token of its own, and whoever writes a checkpoint first looks whether the
  claim still has it.

No lock of the file system is trusted for this. flock holds for one machine; on NFS, Lustre and FUSE it is, as they are mounted,
kept by the server, kept by each machine for itself (and given to both), or refused; and a server that lost a client may hold its
lock for ever. Here it only orders starts of the same second on one machine. Two machines that start in the same second, on a
claim that is silent, are told apart by the token, at the first checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distcse.errors import RunError, StorageError
from distcse.events import Note, Watch
from distcse.files import put

BEAT = 5.0
"""Seconds between two touches of a claim."""
SILENCE = 60.0
"""Seconds without a touch after which a process that cannot be asked for counts as lost: beyond what a network file system
keeps in its caches."""
_LOOK = 1.0


class InUseError(RunError):
    """Somebody works in the folder."""


@dataclass(frozen=True)
class Holder:
    """A process that works in a folder."""

    pid: int
    host: str
    kernel: str
    """The boot and the namespace that the process's number belongs to."""
    began: str
    """When it began, in the kernel's own count: numbers are given again."""

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        return cls(os.getpid(), socket.gethostname(), _kernel(), _began(os.getpid()))

    @property
    def told(self) -> str:
        """In words."""
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Claim:
    """One start's right to write."""

    file: Path
    token: str

    @classmethod
    def stake(cls, folder: Path) -> Claim:
        """Take a folder over: claims before this one no longer hold."""
        claim = cls(folder / "claim", secrets.token_hex(8))
        put(claim.file, json.dumps({"token": claim.token, "holder": asdict(Holder.here())}))
        return claim

    @classmethod
    @contextmanager
    def held(cls, folder: Path, watch: Watch, waits_for: str | None = None) -> Iterator[Claim]:
        """Work in a folder alone.

        Args:
            folder: Where; it exists.
            watch: Told of what is waited for.
            waits_for: What somebody who works there does that is worth waiting for; None refuses at once.

        Raises:
            InUseError: Somebody works there.
        """
        claim = cls._when_free(folder, watch, waits_for)
        ended = threading.Event()
        threading.Thread(target=claim._beat, args=(ended,), name="claim", daemon=True).start()
        try:
            yield claim
        finally:
            ended.set()
            claim._give_back()

    def check(self) -> None:
        """Raise `RunError` where a later start has taken over."""
        try:
            holds = self._holds()
        except OSError as lost:
            raise RunError(f"{self.file} cannot be read: {lost.strerror}; who may write there is not known") from None
        if not holds:
            raise RunError(f"{self.file.parent} was taken over by a later start; this one writes nothing more")

    @classmethod
    def _when_free(cls, folder: Path, watch: Watch, waits_for: str | None) -> Claim:
        is_told = False
        while True:
            seen = _read(folder / "claim")
            if (holder := who_works_in(folder, watch)) is None:
                with _in_order(folder):
                    if _read(folder / "claim") == seen:
                        return cls.stake(folder)
                continue
            if waits_for is None:
                raise InUseError(f"{folder} is in use by {holder.told}; wait for its end, or stop it, then try again")
            if not is_told:
                watch.post(Note(f"{holder.told} {waits_for}; waiting for its end"))
                is_told = True
            time.sleep(_LOOK)

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT):
            # A touch that storage refuses is not the end of the work: the next may succeed, and `check` tells who took over.
            with suppress(OSError):
                if self._holds():
                    os.utime(self.file, follow_symlinks=False)

    def _holds(self) -> bool:
        return _read(self.file).get("token") == self.token

    def _give_back(self) -> None:
        """The token stays: workers of this start may still be there, and those of another must not take theirs for good."""
        # Where that cannot be written (the disk is full, the folder gone), it is free when this process ends.
        with suppress(OSError, StorageError), _in_order(self.file.parent):
            if self._holds():
                put(self.file, json.dumps({"token": self.token}))


def who_works_in(folder: Path, watch: Watch) -> Holder | None:
    """Who works in a folder now; None where nobody does. Takes up to a minute where only another machine could know."""
    file = folder / "claim"
    try:
        holder = Holder(**_read(file)["holder"])
    except (KeyError, TypeError):  # no claim, given back, or of a version that named nobody
        return None
    if holder.kernel == _kernel():
        return holder if _lives(holder) else None
    return None if _is_silent(file, holder, watch) else holder


def _is_silent(file: Path, holder: Holder, watch: Watch) -> bool:
    last = _touched(file)
    # By the clock of the storage on both sides: machines differ in theirs.
    with tempfile.TemporaryFile(dir=file.parent) as new:
        age = os.fstat(new.fileno()).st_mtime - last
    remaining = min(SILENCE, SILENCE - age)
    if remaining > 0:
        watch.post(
            Note(f"{file.parent} was in use by {holder.told}; looking for up to {remaining:.0f} s if it still is")
        )
    until = time.monotonic() + remaining
    while time.monotonic() < until:
        time.sleep(_LOOK)
        if _touched(file) != last:
            return False
    return True


def _touched(file: Path) -> float:
    with open(file, "rb") as opened:  # opening asks a network file system's server, where a name alone asks its cache
        return os.fstat(opened.fileno()).st_mtime


def _read(file: Path) -> dict[str, Any]:
    """What a claim says; nothing where there is none."""
    try:
        content = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def _in_order(folder: Path) -> Iterator[None]:
    """One process of this machine after the other."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # storage without such locks: the token decides
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return socket.gethostname()


def _lives(holder: Holder) -> bool:
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return _began(holder.pid) in (holder.began, "")


def _began(pid: int) -> str:
    """When a process of this machine began; "" where that is hidden, or no Linux tells it."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "is no more" if state in "ZX" else fields[18]
