"""Exclusive access of one start of a run to a folder.

Two mechanisms, because neither suffices alone:

- **Owner.** The file `lease` names the process that works in the folder. Later processes are refused, or wait, while the owner
  lives. On the same machine, the kernel decides immediately, also after SIGKILL: by process id, start time, boot and process
  namespace. From another machine or container, an owner lives while it touches the file, and is lost after 60 s without.
- **Token.** Workers of a killed driver live on for seconds, on a shared cluster longer, and a machine can return after a network
  failure. So each start has its own token, and checkpoints are written only while the file contains it.

In object storage, a small object next to the lease is rewritten instead of a touch. It is not the lease itself, because a machine
that returns would overwrite the lease with its old content.

File-system locks are not sufficient. flock works on one machine. On NFS, Lustre and FUSE, depending on mount options, the server
or each machine keeps the lock (and then several get it), or it is refused; and a server can keep a lost client's lock forever.
Here, flock only orders simultaneous starts on one machine. If two machines take over an expired lease in the same second, the
token decides at the first checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import math
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

from distcse.errors import (
    RunDirectoryError,
    RunError,
    RunInUseError,
    RunTakenOverError,
    StorageError,
)
from distcse.events import LogMessage, Reporter
from distcse.storage import ArtifactStore, storage_errors

HEARTBEAT_S = 5.0
"""Seconds between two touches of a lease file."""
LEASE_TIMEOUT_S = 60.0
"""Seconds without a touch after which an owner on another machine counts as lost; longer than network file systems cache."""
_REMOTE_HEARTBEAT_S = 15.0
"""Seconds between two heartbeats in object storage, where each is a request."""
LEASE_FILES = _FILE, _HEARTBEAT = "lease", "lease.heartbeat"
POLL_S = 1.0
"""Seconds between two looks at another process's lease."""
_REMOTE_POLL_S = 5.0
_LOCK_POLL_S, LOCK_NOTICE_S = 0.1, 1.0
"""Seconds between two tries to lock a folder, and after which a wait is reported: starts hold the lock for milliseconds."""
RELEASE_WAIT_S = 5.0
"""Seconds to wait for the lock of a folder whose lease is released."""
_held_here: set[str] = set()
"""Tokens of this process's active leases. Other lease files that name this process were not released because writing failed."""


@dataclass(frozen=True)
class LeaseOwner:
    """A process that works in a folder."""

    pid: int
    host: str
    kernel: str
    """Boot id and process namespace, in which `pid` is valid."""
    start_time: str
    """Start time of the process in the kernel's units, because process ids are reused."""

    @classmethod
    def here(cls) -> LeaseOwner:
        """Describe this process."""
        return cls(os.getpid(), socket.gethostname(), _kernel(), _start_time(os.getpid()))

    @property
    def description(self) -> str:
        """Description in messages."""
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Lease:
    """The right of one start of a run to write to its folder."""

    folder: ArtifactStore
    """The folder, which contains the lease file."""
    token: str
    """Token of this start."""
    has_local_changes: bool = False
    """Whether the folder is in object storage and its previous start was on this machine. The local copy then has everything
    that is stored, and possibly files that could not be uploaded."""

    @classmethod
    def acquire(cls, folder: ArtifactStore) -> Lease:
        """Take over a folder; earlier leases become invalid.

        Raises:
            StorageWriteError: The lease file cannot be written.
        """
        lease = cls(folder, secrets.token_hex(8), has_local_changes(folder))
        _held_here.add(lease.token)
        lease.folder.write_text(_FILE, json.dumps({"token": lease.token, "owner": asdict(LeaseOwner.here())}))
        return lease

    @classmethod
    @contextmanager
    def held(cls, folder: ArtifactStore, reporter: Reporter, waits_for: str | None = None) -> Iterator[Lease]:
        """Context manager: hold the lease of a folder, and keep it alive with heartbeats.

        Args:
            folder: An existing folder.
            reporter: Receives a message before a wait, and can request to stop it.
            waits_for: What another owner does, such as `embeds the same sentences`, to wait for its end. Default: raise.

        Raises:
            RunDirectoryError: The lease cannot be read.
            RunInUseError: Another process works in the folder, and `waits_for` is None.
            StoppedEarlyError: A stop was requested during a wait.
            StorageWriteError: The lease file cannot be written.
        """
        with _reading(folder):
            lease = cls._acquire_when_free(folder, reporter, waits_for)
        ended = threading.Event()
        threading.Thread(target=lease._beat, args=(ended,), name="lease-heartbeat", daemon=True).start()
        try:
            yield lease
        finally:
            ended.set()
            _held_here.discard(lease.token)
            lease._release()

    def check(self) -> None:
        """Check that the lease is valid.

        Raises:
            RunTakenOverError: A later start has taken over the folder, or the lease file cannot be read.
        """
        try:
            is_valid = self._is_valid()
        except OSError as error:
            raise RunTakenOverError(
                f"{self.folder}/{_FILE} cannot be read ({error.strerror}), so a later start may have taken over; check the "
                "storage, then use --resume"
            ) from None
        if not is_valid:
            raise self._taken_over_error()

    def check_here(self) -> None:
        """Like `check`, but read only this machine's copy of the file, which also works while object storage is unreachable.

        Raises:
            RunTakenOverError: A later start on this machine has taken over the folder.
        """
        if not self.folder.is_remote:
            self.check()
        elif _local_token(self.folder) not in (None, self.token):
            raise self._taken_over_error()

    def _taken_over_error(self) -> RunError:
        return RunTakenOverError(f"{self.folder} was taken over by a later start; this start writes nothing more")

    @classmethod
    def _acquire_when_free(cls, folder: ArtifactStore, reporter: Reporter, waits_for: str | None) -> Lease:
        is_reported = False
        while True:
            content = _read(folder)
            if (owner := _find_owner(folder, reporter)) is None:
                with _local_lock(folder, reporter):
                    if _read(folder) == content:
                        return cls.acquire(folder)
                continue
            if waits_for is None:
                raise RunInUseError(
                    f"{folder} is in use by {owner.description}; wait for its end, or stop it, then try again"
                )
            if not is_reported:
                reporter.emit(LogMessage(f"{owner.description} {waits_for}; waiting for its end"))
                is_reported = True
            _wait(POLL_S, folder, reporter)

    def _beat(self, ended: threading.Event) -> None:
        beats = 0
        while not ended.wait(_REMOTE_HEARTBEAT_S if self.folder.is_remote else HEARTBEAT_S):
            # A failed touch is no reason to stop: the next one may succeed, and `check` detects a takeover.
            with suppress(OSError, StorageError):
                if self._is_valid():
                    beats += 1
                    _touch(self.folder, f"{self.token} {beats}")

    def _is_valid(self) -> bool:
        return _read(self.folder).get("token") == self.token

    def _release(self) -> None:
        """Remove the owner from the lease file. The token remains, because this start's workers may still be writing."""
        # If the file cannot be written (full disk, deleted folder, a lock that stays), the lease becomes free when this process
        # ends.
        with suppress(OSError, StorageError), _local_lock(self.folder, Reporter(), RELEASE_WAIT_S):
            if self._is_valid():
                self.folder.write_text(_FILE, json.dumps({"token": self.token}))


def find_owner(folder: ArtifactStore, reporter: Reporter) -> LeaseOwner | None:
    """Return the process that works in a folder, or None. It takes up to 60 s if the owner is on another machine."""
    with _reading(folder):
        return _find_owner(folder, reporter)


@contextmanager
def _reading(folder: ArtifactStore) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"{folder}/{_FILE} cannot be read: {error.strerror}; check the storage and its permissions, then try again"
        ) from error


def _find_owner(folder: ArtifactStore, reporter: Reporter) -> LeaseOwner | None:
    content = _read(folder)
    try:
        owner = LeaseOwner(**content["owner"])
    except (KeyError, TypeError):  # no lease, or a released one
        return None
    if owner == LeaseOwner.here():
        return owner if content["token"] in _held_here else None
    if owner.kernel == _kernel():
        return owner if _is_alive(owner) else None
    return None if _has_expired(folder, owner, reporter) else owner


def has_local_changes(folder: ArtifactStore) -> bool:
    """Return whether a folder is in object storage and its latest start was on this machine."""
    if not folder.is_remote:
        return False
    token = _local_token(folder)
    return token is not None and token == _read(folder).get("token")


def _has_expired(folder: ArtifactStore, owner: LeaseOwner, reporter: Reporter) -> bool:
    last = _last_touch(folder)
    remaining = min(LEASE_TIMEOUT_S, LEASE_TIMEOUT_S - _age(folder, last))
    if remaining > 0:
        reporter.emit(
            LogMessage(
                f"{folder} was in use by {owner.description}; checking for up to {remaining:.0f} s whether it still is"
            )
        )
    until = time.monotonic() + remaining
    while time.monotonic() < until:
        _wait(_REMOTE_POLL_S if folder.is_remote else POLL_S, folder, reporter)
        if _last_touch(folder) != last:
            return False
    return True


def _wait(seconds: float, folder: ArtifactStore, reporter: Reporter) -> None:
    reporter.check_stop(f"while waiting for another process in {folder}")
    time.sleep(seconds)


def _touch(folder: ArtifactStore, content: str) -> None:
    if folder.is_remote:
        folder.write_text(_HEARTBEAT, content)
    else:
        os.utime(folder.path / _FILE, follow_symlinks=False)


def _last_touch(folder: ArtifactStore) -> float | bytes | None:
    """Return a value that changes with each touch: the modification time, or the heartbeat's content in object storage."""
    if folder.is_remote:
        return folder.read(_HEARTBEAT)
    # Opening the file bypasses a network file system's cache of attributes.
    with open(folder.path / _FILE, "rb") as opened:
        return os.fstat(opened.fileno()).st_mtime


def _age(folder: ArtifactStore, touched: float | bytes | None) -> float:
    """Return the seconds since a touch by the storage's clock, as machines' clocks differ; 0 if it cannot be read."""
    if not isinstance(touched, float):  # object storage
        return 0.0
    with suppress(OSError), tempfile.TemporaryFile(dir=folder.path) as new:
        return os.fstat(new.fileno()).st_mtime - touched
    return 0.0  # full or read-only storage


def _read(folder: ArtifactStore) -> dict[str, Any]:
    """Read a lease file from storage; return an empty dictionary if there is none."""
    content = folder.read(_FILE)
    return {} if content is None else _parse(content)


def _local_token(folder: ArtifactStore) -> str | None:
    """Return the token in this machine's copy of a lease file; None if there is no copy."""
    file = folder.path / _FILE
    return str(_parse(file.read_bytes()).get("token", "")) if file.is_file() else None


def _parse(content: bytes) -> dict[str, Any]:
    try:
        lease = json.loads(content)
    except ValueError:
        return {}
    return lease if isinstance(lease, dict) else {}


@contextmanager
def _local_lock(folder: ArtifactStore, reporter: Reporter, limit_s: float = math.inf) -> Iterator[None]:
    """Context manager: hold a lock among the processes of this machine."""
    if folder.is_remote:  # its local copy may not exist yet
        with storage_errors(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder.path, os.O_RDONLY)
    try:
        began, is_reported = time.monotonic(), False
        # Not LOCK_EX alone: the kernel would wait without an end, and repeat the wait after a signal (PEP 475).
        while not _locks(handle):
            reporter.check_stop(f"while another process held the lock of {folder}")
            if (waited_s := time.monotonic() - began) > limit_s:
                raise TimeoutError(f"the lock of {folder} is held by another process")
            if waited_s >= LOCK_NOTICE_S and not is_reported:
                reporter.emit(
                    LogMessage(f"waiting for the lock of {folder}, which another process or the server holds")
                )
                is_reported = True
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(handle)


def _locks(handle: int) -> bool:
    """Lock an open folder; return False if another process holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without flock: the token decides
        pass
    return True


def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _is_alive(owner: LeaseOwner) -> bool:
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process of another user
        pass
    return _start_time(owner.pid) in (owner.start_time, "")


def _start_time(pid: int) -> str:
    """Return the start time of a process on this machine; "" if it is hidden, or without Linux's /proc."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "is no more" if state in "ZX" else fields[18]
