"""Leases with real processes: alive, stopped, killed, and apparently on another machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
from tests.conftest import ROOT
from tests.disks import disk
from tests.failures import fails_with

PROGRAM = """
import sys, time
from pathlib import Path
from distcse.errors import RunInUseError
from distcse.events import Reporter
from distcse.runs.lease import Lease
try:
    with Lease.held(Path(sys.argv[1]), Reporter()):
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
        with fails_with(RunInUseError, str(tmp_path), f"process {first.pid} on "), Lease.held(tmp_path, Reporter()):
            pass
    first.kill()
    while find_owner(tmp_path, Reporter()) is not None:  # until the kernel has ended it
        time.sleep(0.01)
    with Lease.held(tmp_path, Reporter()) as lease:  # its parent has not reaped it: a zombie is no owner
        lease.check()
        assert find_owner(tmp_path, Reporter()) is not None
    assert find_owner(tmp_path, Reporter()) is None


def test_one_of_several_concurrent_starts_gets_the_lease(tmp_path: Path, start: Start) -> None:
    lines = [first_line(process) for process in [start(tmp_path) for _ in range(3)]]
    assert lines.count("held") == 1
    assert sum(f"{tmp_path} is in use by process" in line for line in lines) == 2


def test_a_waiting_start_continues_when_the_owner_ends(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path, 1)
    assert first_line(first) == "held"
    events: list[Event] = []
    with Lease.held(tmp_path, Reporter(events.append), waits_for="embeds"):
        assert first.wait(10) == 0
    (note,) = events
    assert isinstance(note, LogMessage) and f"process {first.pid} on " in note.text and " embeds" in note.text


def test_a_process_with_a_reused_id_is_not_the_owner(tmp_path: Path) -> None:
    lease = Lease.acquire(tmp_path)
    assert find_owner(tmp_path, Reporter()) is not None
    change_owner(tmp_path, start_time="1")
    assert find_owner(tmp_path, Reporter()) is None
    lease.check()


@pytest.mark.parametrize("kernel", ["of another machine", "of another container"])
def test_an_owner_on_another_machine_is_lost_without_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """Its process id can be unused on this machine."""
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(leases, "LEASE_TIMEOUT_S", 0.8)
    monkeypatch.setattr(leases, "POLL_S", 0.1)
    events: list[Event] = []
    with Lease.held(tmp_path, Reporter()):
        change_owner(tmp_path, kernel=kernel, host="far", pid=2**22 + 1)
        with (
            fails_with(RunInUseError, str(tmp_path), f"process {2**22 + 1} on far"),
            Lease.held(tmp_path, Reporter(events.append)),
        ):
            pass
    (note,) = events
    assert isinstance(note, LogMessage) and str(tmp_path) in note.text and f"process {2**22 + 1} on far" in note.text
    assert find_owner(tmp_path, Reporter()) is None  # released
    lost = Lease.acquire(tmp_path)
    change_owner(tmp_path, kernel=kernel)
    with Lease.held(tmp_path, Reporter()) as lease:
        lease.check()
        with fails_with(RunTakenOverError, str(tmp_path)):
            lost.check()


def test_a_stop_while_waiting_names_the_folder(tmp_path: Path) -> None:
    with Lease.held(tmp_path, Reporter()):
        change_owner(tmp_path, kernel="of another machine", host="far")
        with (
            fails_with(StoppedEarlyError, str(tmp_path)),
            Lease.held(tmp_path, Reporter(stop_requested=lambda: True), waits_for="embeds"),
        ):
            pass


def test_an_expired_lease_is_taken_over_without_a_wait(tmp_path: Path) -> None:
    Lease.acquire(tmp_path)
    change_owner(tmp_path, kernel="of another machine")
    os.utime(tmp_path / "lease", (time.time() - 3600,) * 2)
    events: list[Event] = []
    with Lease.held(tmp_path, Reporter(events.append)):
        assert not events  # a start that waits reports the owner


@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_a_far_owner_is_checked_on_storage_that_refuses_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """`--rerun` of a colleague's run only reads."""
    monkeypatch.setattr(leases, "LEASE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(leases, "POLL_S", 0.1)
    with disk(tmp_path / "disk", kind) as storage:
        Lease.acquire(storage.path)
        change_owner(storage.path, kernel="of another machine")
        with storage.refusing():
            assert find_owner(storage.path, Reporter()) is None
            with fails_with(StorageWriteError, str(storage.path)), Lease.held(storage.path, Reporter()):
                pass


def test_a_lease_that_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "lease").mkdir()
    with fails_with(RunDirectoryError, f"{tmp_path}/lease"):
        find_owner(tmp_path, Reporter())
    with fails_with(RunDirectoryError, f"{tmp_path}/lease"), Lease.held(tmp_path, Reporter()):
        pass


def test_an_earlier_start_does_not_touch_a_later_ones_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.05)
    with Lease.held(tmp_path, Reporter()):
        Lease.acquire(tmp_path)
        os.utime(tmp_path / "lease", (0, 0))
        time.sleep(0.5)
        assert (tmp_path / "lease").stat().st_mtime == 0
    assert "owner" in json.loads((tmp_path / "lease").read_text())  # and does not release it


@pytest.mark.parametrize("content", ["", "0123456789abcdef", "[]", '{"owner": 3}', '{"owner": {"pid": 1}}', "\0\xff"])
def test_a_lease_without_a_valid_owner_is_free(tmp_path: Path, content: str) -> None:
    (tmp_path / "lease").write_text(content)
    with Lease.held(tmp_path, Reporter()) as lease:
        lease.check()
