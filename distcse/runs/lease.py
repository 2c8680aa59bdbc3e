"""Who may work in a folder: one start at a time, and nobody who still works for an earlier one.

Two things, because neither is enough:

- **Who is let in.** The claim names the process that works in the folder. Whoever comes later is refused, or waits, as long as
  that process lives. On one machine the kernel says so, at once also after SIGKILL: by the number of the process and the time it
  began, on this boot and in this namespace of processes. From another machine or container nobody can ask the kernel: there it
  lives as long as it touches the claim, and counts as lost when it has not for a minute.
- **Who may write.** A driver that is killed leaves its workers alive for seconds, on a shared cluster for longer, and a machine
  that was only cut off comes back. Each start has a token of its own, and whoever writes a checkpoint first looks whether the
  claim still has it.

In object storage a small object beside the claim is put anew instead of a touch. It is not the claim itself: a machine that comes
back puts whatever it was about to put.

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

from distcse.errors import RunError, RunInUseError, RunTakenOverError, StoppedEarlyError, StorageError
from distcse.events import LogMessage, Reporter
from distcse.files import storage_errors
from distcse.storage import RemotePath, read, to_uri, write_text_atomic

HEARTBEAT_S = 5.0
"""Seconds between two touches of a claim."""
LEASE_TIMEOUT_S = 60.0
"""Seconds without a touch after which a process that cannot be asked for counts as lost: beyond what a network file system
keeps in its caches."""
_BEAT_STORED = 15.0
"""The same in object storage, where each is a request; `LEASE_TIMEOUT_S` is several of them."""
_LOOK = 1.0
_LOOK_STORED = 5.0
_held_here: set[str] = set()
"""Tokens of the claims that this process works by: of others that name it, it could not say that it gave them back."""


@dataclass(frozen=True)
class LeaseOwner:
    """A process that works in a folder."""

    pid: int
    host: str
    kernel: str
    """The boot and the namespace that the process's number belongs to."""
    began: str
    """When it began, in the kernel's own count: numbers are given again."""

    @classmethod
    def here(cls) -> LeaseOwner:
        """This process."""
        return cls(os.getpid(), socket.gethostname(), _kernel(), _began(os.getpid()))

    @property
    def describe(self) -> str:
        """In words."""
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Lease:
    """One start's right to write."""

    file: Path
    token: str
    left_here: bool = False
    """Whether the start before was this machine's, of a folder in object storage: then its mirror here holds all that is stored,
    and what could not be stored."""

    @classmethod
    def acquire(cls, folder: Path) -> Lease:
        """Take a folder over: claims before this one no longer hold."""
        lease = cls(folder / "claim", secrets.token_hex(8), was_left_here(folder))
        _held_here.add(lease.token)
        write_text_atomic(lease.file, json.dumps({"token": lease.token, "holder": asdict(LeaseOwner.here())}))
        return lease

    @classmethod
    @contextmanager
    def held(cls, folder: Path, reporter: Reporter, waits_for: str | None = None) -> Iterator[Lease]:
        """Work in a folder alone.

        Args:
            folder: Where; it exists.
            reporter: Receives a note of what is waited for.
            waits_for: What somebody who works there does that is worth waiting for; None refuses at once.

        Raises:
            RunInUseError: Somebody works there.
        """
        lease = cls._when_free(folder, reporter, waits_for)
        ended = threading.Event()
        threading.Thread(target=lease._beat, args=(ended,), name="claim", daemon=True).start()
        try:
            yield lease
        finally:
            ended.set()
            _held_here.discard(lease.token)
            lease._give_back()

    def check(self) -> None:
        """Raise `RunError` where a later start has taken over."""
        try:
            holds = self._holds()
        except OSError as lost:
            raise RunTakenOverError(
                f"{self.file} cannot be read: {lost.strerror}; who may write there is not known"
            ) from None
        if not holds:
            raise self._taken_over()

    def check_here(self) -> None:
        """As `check`, by what this machine knows: of a mirror that is enough to write in it, while storage is away too."""
        if not isinstance(self.file, RemotePath):
            self.check()
        elif self.file.is_file() and _parsed(self.file.read_bytes()).get("token") != self.token:
            raise self._taken_over()

    def _taken_over(self) -> RunError:
        return RunTakenOverError(
            f"{to_uri(self.file.parent)} was taken over by a later start; this one writes nothing more"
        )

    @classmethod
    def _when_free(cls, folder: Path, reporter: Reporter, waits_for: str | None) -> Lease:
        is_told = False
        while True:
            seen = _read(folder / "claim")
            if (holder := who_works_in(folder, reporter)) is None:
                with _in_order(folder):
                    if _read(folder / "claim") == seen:
                        return cls.acquire(folder)
                continue
            if waits_for is None:
                raise RunInUseError(
                    f"{to_uri(folder)} is in use by {holder.describe}; wait for its end, or stop it, then try again"
                )
            if not is_told:
                reporter.emit(LogMessage(f"{holder.describe} {waits_for}; waiting for its end"))
                is_told = True
            _wait(_LOOK, reporter)

    def _beat(self, ended: threading.Event) -> None:
        beats = 0
        while not ended.wait(_BEAT_STORED if isinstance(self.file, RemotePath) else HEARTBEAT_S):
            # A touch that storage refuses is not the end of the work: the next may succeed, and `check` tells who took over.
            with suppress(OSError, StorageError):
                if self._holds():
                    beats += 1
                    _touch(self.file, f"{self.token} {beats}")

    def _holds(self) -> bool:
        return _read(self.file).get("token") == self.token

    def _give_back(self) -> None:
        """The token stays: workers of this start may still be there, and those of another must not take theirs for good."""
        # Where that cannot be written (the disk is full, the folder gone), it is free when this process ends.
        with suppress(OSError, StorageError), _in_order(self.file.parent):
            if self._holds():
                write_text_atomic(self.file, json.dumps({"token": self.token}))


def who_works_in(folder: Path, reporter: Reporter) -> LeaseOwner | None:
    """Who works in a folder now; None where nobody does. Takes up to a minute where only another machine could know."""
    file = folder / "claim"
    lease = _read(file)
    try:
        holder = LeaseOwner(**lease["holder"])
    except (KeyError, TypeError):  # no claim, given back, or of a version that named nobody
        return None
    if holder == LeaseOwner.here():
        return holder if lease["token"] in _held_here else None
    if holder.kernel == _kernel():
        return holder if _lives(holder) else None
    return None if _is_silent(file, holder, reporter) else holder


def was_left_here(folder: Path) -> bool:
    """Whether the latest start in a folder of object storage was this machine's."""
    file = folder / "claim"
    if not isinstance(file, RemotePath) or not file.is_file():
        return False
    token = _parsed(file.read_bytes()).get("token")
    return token is not None and token == _read(file).get("token")


def _is_silent(file: Path, holder: LeaseOwner, reporter: Reporter) -> bool:
    last = _touched(file)
    remaining = min(LEASE_TIMEOUT_S, LEASE_TIMEOUT_S - _age(file, last))
    if remaining > 0:
        reporter.emit(
            LogMessage(
                f"{to_uri(file.parent)} was in use by {holder.describe}; looking for up to {remaining:.0f} s if it still is"
            )
        )
    until = time.monotonic() + remaining
    while time.monotonic() < until:
        _wait(_LOOK_STORED if isinstance(file, RemotePath) else _LOOK, reporter)
        if _touched(file) != last:
            return False
    return True


def _wait(seconds: float, reporter: Reporter) -> None:
    if reporter.stop_requested():
        raise StoppedEarlyError(
            "stopped while another process works there; go on later with --resume, or start it again"
        )
    time.sleep(seconds)


def _touch(file: Path, sign: str) -> None:
    if isinstance(file, RemotePath):
        write_text_atomic(_beats(file), sign)
    else:
        os.utime(file, follow_symlinks=False)


def _touched(file: Path) -> float | bytes | None:
    """What another touch changes."""
    if isinstance(file, RemotePath):
        return read(_beats(file))
    with open(file, "rb") as opened:  # opening asks a network file system's server, where a name alone asks its cache
        return os.fstat(opened.fileno()).st_mtime


def _age(file: Path, touched: float | bytes | None) -> float:
    """Seconds since a touch, by the clock of the storage on both sides: machines differ in theirs. Object storage tells none."""
    if not isinstance(touched, float):
        return 0.0
    with tempfile.TemporaryFile(dir=file.parent) as new:
        return os.fstat(new.fileno()).st_mtime - touched


def _beats(file: Path) -> Path:
    return file.with_name("claim.beats")


def _read(file: Path) -> dict[str, Any]:
    """What a claim says, where it is kept; nothing where there is none."""
    try:
        content = read(file)
    except FileNotFoundError:  # given up between a look and the next
        return {}
    return {} if content is None else _parsed(content)


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        lease = json.loads(content)
    except ValueError:
        return {}
    return lease if isinstance(lease, dict) else {}


@contextmanager
def _in_order(folder: Path) -> Iterator[None]:
    """One process of this machine after the other."""
    if isinstance(folder, RemotePath):  # which may not be here yet
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
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


def _lives(holder: LeaseOwner) -> bool:
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
