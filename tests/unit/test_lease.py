"""Leases with real processes: alive, stopped, killed, and apparently on another machine."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from distcse.errors import (
    RunDirectoryError,
    RunInUseError,
    RunTakenOverError,
    StoppedEarlyError,
    StorageWriteError,
)
from distcse.events import Event, LogMessage, Reporter
from distcse.runs import lease as leases
from distcse.runs.lease import Lease, find_owner
from distcse.storage import open_store
from tests.conftest import ROOT
from tests.disks import disk
from tests.failures import fails_with

PROGRAM = """
import sys, time
from distcse.errors import RunInUseError
from distcse.events import Reporter
from distcse.runs.lease import Lease
from distcse.storage import open_store
try:
    with Lease.held(open_store(sys.argv[1]), Reporter()):
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
except RunInUseError as error:
    print(error, flush=True)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(folder: Path, seconds: float = 60) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, str(folder), str(seconds)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def change_owner(folder: Path, **fields: Any) -> None:
    """Change fields of the owner in a folder's lease."""
    lease = json.loads((folder / "lease").read_text())
    lease["owner"].update(fields)
    (folder / "lease").write_text(json.dumps(lease))


def test_a_folder_in_use_is_refused_until_its_owner_is_killed(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path)
    assert first_line(first) == "held"
    for state in (signal.SIGCONT, signal.SIGSTOP):  # running, and stopped: it can continue at any time
        first.send_signal(state)
        with (
            fails_with(RunInUseError, str(tmp_path), f"process {first.pid} on "),
            Lease.held(open_store(tmp_path), Reporter()),
        ):
            pass
    first.kill()
    while find_owner(open_store(tmp_path), Reporter()) is not None:  # until the kernel has ended it
        time.sleep(0.01)
    with Lease.held(open_store(tmp_path), Reporter()) as lease:  # its parent has not reaped it: a zombie is no owner
        lease.check()
        assert find_owner(open_store(tmp_path), Reporter()) is not None
    assert find_owner(open_store(tmp_path), Reporter()) is None


def test_one_of_several_concurrent_starts_gets_the_lease(tmp_path: Path, start: Start) -> None:
    lines = [first_line(process) for process in [start(tmp_path) for _ in range(3)]]
    assert lines.count("held") == 1
    assert sum(f"{tmp_path} is in use by process" in line for line in lines) == 2


def test_a_waiting_start_continues_when_the_owner_ends(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "POLL_S", 0.1)
    first = start(tmp_path, 0.5)
    assert first_line(first) == "held"
    events: list[Event] = []
    with Lease.held(open_store(tmp_path), Reporter(events.append), waits_for="embeds"):
        assert first.wait(10) == 0
    (note,) = events
    assert isinstance(note, LogMessage) and f"process {first.pid} on " in note.text and " embeds" in note.text


def test_an_owner_on_another_machine_lives_while_its_heart_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process id can be unused on this machine. `Starts` has owners that are lost, and what their starts may write."""
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(leases, "LEASE_TIMEOUT_S", 0.8)
    monkeypatch.setattr(leases, "POLL_S", 0.1)
    events: list[Event] = []
    with Lease.held(open_store(tmp_path), Reporter()):
        change_owner(tmp_path, kernel="of another machine", host="far", pid=2**22 + 1)
        with (
            fails_with(RunInUseError, str(tmp_path), f"process {2**22 + 1} on far"),
            Lease.held(open_store(tmp_path), Reporter(events.append)),
        ):
            pass
    (note,) = events
    assert isinstance(note, LogMessage) and str(tmp_path) in note.text and f"process {2**22 + 1} on far" in note.text
    assert find_owner(open_store(tmp_path), Reporter()) is None  # released


@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_a_far_owner_is_checked_on_storage_that_refuses_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """`--rerun` of a colleague's run only reads."""
    monkeypatch.setattr(leases, "LEASE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(leases, "POLL_S", 0.1)
    with disk(tmp_path / "disk", kind) as storage:
        Lease.acquire(open_store(storage.path))
        change_owner(storage.path, kernel="of another machine")
        with storage.refusing():
            assert find_owner(open_store(storage.path), Reporter()) is None
            with fails_with(StorageWriteError, str(storage.path)), Lease.held(open_store(storage.path), Reporter()):
                pass


def test_a_lease_that_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "lease").mkdir()
    with fails_with(RunDirectoryError, f"{tmp_path}/lease"):
        find_owner(open_store(tmp_path), Reporter())
    with fails_with(RunDirectoryError, f"{tmp_path}/lease"), Lease.held(open_store(tmp_path), Reporter()):
        pass


@pytest.mark.parametrize("wait", ["another start", "a start on another machine", "lock"])
def test_a_wait_for_another_process_is_reported_once_and_hears_a_stop(
    wait: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LOCK_NOTICE_S", 0.0)
    monkeypatch.setattr(leases, "POLL_S", 0.1)
    asked, events = list[None](), list[Event]()
    reporter = Reporter(events.append, lambda: len(asked) > 2 or asked.append(None) is not None)
    handle = os.open(tmp_path, os.O_RDONLY)
    with ExitStack() as stack:
        if wait == "lock":
            fcntl.flock(handle, fcntl.LOCK_EX)
        else:
            stack.enter_context(Lease.held(open_store(tmp_path), Reporter()))
        if wait == "a start on another machine":
            change_owner(tmp_path, kernel="of another machine", host="far")
        with (
            fails_with(StoppedEarlyError, str(tmp_path)),
            Lease.held(open_store(tmp_path), reporter, waits_for="embeds"),
        ):
            pass
        os.close(handle)
    assert len([event for event in events if isinstance(event, LogMessage)]) == 1
    with Lease.held(open_store(tmp_path), Reporter()):
        pass


def test_a_run_ends_though_the_lock_of_its_folder_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RELEASE_WAIT_S", 0.0)
    handle = os.open(tmp_path, os.O_RDONLY)
    with Lease.held(open_store(tmp_path), Reporter()):
        fcntl.flock(handle, fcntl.LOCK_EX)
    os.close(handle)
    with Lease.held(open_store(tmp_path), Reporter()):  # this process no longer has the lease that was not released
        pass


class Clock:
    """The time that waits of leases take; the owner on another machine beats at each wait while it is alive."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat, self._now = beat, 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        self._beat()


class Starts(RuleBasedStateMachine):
    """Starts of one run, on this machine and on others, that end, are lost, or continue after a later one began."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.patch, self.beats = pytest.MonkeyPatch(), 0
        self.patch.setattr(leases, "time", Clock(self.beat))
        self.begun: list[tuple[Lease, ExitStack]] = []
        self.latest: Lease | None = None
        self.owner_is_alive = self.is_far = self.is_lately_lost = False

    def teardown(self) -> None:
        for _, held in self.begun:
            held.close()
        self.patch.undo()
        shutil.rmtree(self.folder)

    def beat(self) -> None:
        if self.owner_is_alive and self.is_far:
            self.beats += 1
            os.utime(self.folder / "lease", (self.beats, time.time() + self.beats))

    @rule(kernel=st.sampled_from(["", "of another machine", "of another container"]))
    def begin(self, kernel: str) -> None:
        held, events = ExitStack(), list[Event]()
        if self.owner_is_alive:
            with fails_with(RunInUseError, str(self.folder), "process "):
                held.enter_context(Lease.held(open_store(self.folder), Reporter()))
            return
        self.latest = held.enter_context(Lease.held(open_store(self.folder), Reporter(events.append)))
        assert len(events) == self.is_lately_lost, "only a start that waits reports the owner"
        self.begun.append((self.latest, held))
        self.owner_is_alive, self.is_far, self.is_lately_lost = True, bool(kernel), False
        if kernel:
            change_owner(
                self.folder, kernel=kernel, host="far", pid=2**22 + 1
            )  # no process of this machine has this id

    @precondition(lambda self: self.owner_is_alive)
    @rule(age_s=st.sampled_from([0, 3600]))
    def lose_the_owner(self, age_s: int) -> None:
        """Its process is killed, and its id taken by another one; or its machine is lost, now or an hour ago."""
        if not self.is_far:
            change_owner(self.folder, start_time="1")
        os.utime(self.folder / "lease", (time.time() - age_s,) * 2)
        self.owner_is_alive, self.is_lately_lost = False, self.is_far and not age_s

    @precondition(lambda self: bool(self.begun))
    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        """A start ends: the latest one frees the folder, an earlier one changes nothing."""
        lease, held = self.begun.pop(number % len(self.begun))
        before = (self.folder / "lease").read_text()
        held.close()
        if lease is self.latest:
            self.owner_is_alive = self.is_lately_lost = False
        else:
            assert (self.folder / "lease").read_text() == before

    @precondition(lambda self: self.latest is not None and not self.owner_is_alive)
    @rule(content=st.sampled_from(["", "0123456789abcdef", "[]", '{"owner": 3}', '{"owner": {"pid": 1}}', "\0\xff"]))
    def damage(self, content: str) -> None:
        """A file without a valid owner is free."""
        (self.folder / "lease").write_text(content)
        self.latest, self.is_lately_lost = None, False

    @invariant()
    def only_the_latest_start_may_write(self) -> None:
        assert (find_owner(open_store(self.folder), Reporter()) is not None) == self.owner_is_alive
        for lease, _ in self.begun:
            if lease is self.latest:
                lease.check()
            else:
                with fails_with(RunTakenOverError, str(self.folder)):
                    lease.check()


TestStarts = Starts.TestCase
TestStarts.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)


def test_an_earlier_start_does_not_touch_a_later_ones_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.02)
    with Lease.held(open_store(tmp_path), Reporter()):
        Lease.acquire(open_store(tmp_path))
        os.utime(tmp_path / "lease", (0, 0))
        time.sleep(0.2)
        assert (tmp_path / "lease").stat().st_mtime == 0
