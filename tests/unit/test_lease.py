"""One start at a time in a folder, tried with real processes: alive, stopped, killed, and on what looks like another machine."""

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

from distcse.errors import RunError, RunInUseError
from distcse.events import Event, LogMessage, Reporter
from distcse.runs import lease as leases
from distcse.runs.lease import Lease, find_owner
from tests.conftest import ROOT

HOLDS = """
import sys, time
from pathlib import Path
from distcse.errors import RunInUseError
from distcse.events import Reporter
from distcse.runs.lease import Lease
try:
    with Lease.held(Path(sys.argv[1]), Reporter()):
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
except RunInUseError as refused:
    print(refused, flush=True)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(folder: Path, seconds: float = 60) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDS, str(folder), str(seconds)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def told_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def change(folder: Path, **of_holder: Any) -> None:
    """Rewrite who is said to hold a folder."""
    said = json.loads((folder / "claim").read_text())
    said["holder"].update(of_holder)
    (folder / "claim").write_text(json.dumps(said))


def test_a_folder_in_use_is_refused_until_its_holder_is_killed(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path)
    assert told_by(first) == "held"
    for state in (signal.SIGCONT, signal.SIGSTOP):  # at work, and stopped: it may go on at any time
        first.send_signal(state)
        with pytest.raises(
            RunInUseError, match=rf"is in use by process {first.pid} on .*; wait for its end, or stop it"
        ):
            Lease._when_free(tmp_path, Reporter(), None)
    first.kill()
    began = time.monotonic()
    while find_owner(tmp_path, Reporter()) is not None:  # until the kernel has ended it
        assert time.monotonic() - began < 10
    with Lease.held(
        tmp_path, Reporter()
    ) as ours:  # its parent has not even asked for its end: what is left of it is nobody
        ours.check()
        assert find_owner(tmp_path, Reporter()) is not None
    assert find_owner(tmp_path, Reporter()) is None


def test_of_several_starts_at_once_one_is_let_in(tmp_path: Path, start: Start) -> None:
    answers = [told_by(process) for process in [start(tmp_path) for _ in range(3)]]
    assert answers.count("held") == 1
    assert sum("is in use by process" in answer for answer in answers) == 2


def test_who_waits_goes_on_when_the_holder_ends(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path, 1)
    assert told_by(first) == "held"
    heard: list[Event] = []
    with Lease.held(tmp_path, Reporter(heard.append), waits_for="embeds"):
        assert first.wait(10) == 0
    (note,) = heard
    assert isinstance(note, LogMessage) and note.text.endswith("embeds; waiting for its end")


def test_a_number_that_was_given_again_is_no_holder(tmp_path: Path) -> None:
    lease = Lease.acquire(tmp_path)
    assert find_owner(tmp_path, Reporter()) is not None
    change(tmp_path, began="1")
    assert find_owner(tmp_path, Reporter()) is None
    lease.check()


@pytest.mark.parametrize("kernel", ["of another machine", "of another container"])
def test_elsewhere_only_silence_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """A process of another kernel has any number, one that is free here too."""
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(leases, "LEASE_TIMEOUT_S", 0.8)
    monkeypatch.setattr(leases, "_POLL_S", 0.1)
    heard: list[Event] = []
    with Lease.held(tmp_path, Reporter()):
        change(tmp_path, kernel=kernel, host="far", pid=2**22 + 1)
        with pytest.raises(RunInUseError, match=f"process {2**22 + 1} on far"):
            Lease._when_free(tmp_path, Reporter(heard.append), None)
    (note,) = heard
    assert isinstance(note, LogMessage) and "looking for up to" in note.text
    assert find_owner(tmp_path, Reporter()) is None  # given back
    lost = Lease.acquire(tmp_path)
    change(tmp_path, kernel=kernel)
    with Lease.held(tmp_path, Reporter()) as ours:
        ours.check()
        with pytest.raises(RunError, match="was taken over by a later start"):
            lost.check()


def test_one_that_was_silent_long_ago_is_not_waited_for(tmp_path: Path) -> None:
    Lease.acquire(tmp_path)
    change(tmp_path, kernel="of another machine")
    os.utime(tmp_path / "claim", (time.time() - 3600,) * 2)
    began = time.monotonic()
    with Lease.held(tmp_path, Reporter()):
        assert time.monotonic() - began < 5


def test_a_lost_start_does_not_keep_a_later_ones_claim_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.05)
    with Lease.held(tmp_path, Reporter()):
        Lease.acquire(tmp_path)
        os.utime(tmp_path / "claim", (0, 0))
        time.sleep(0.5)
        assert (tmp_path / "claim").stat().st_mtime == 0
    assert "holder" in json.loads((tmp_path / "claim").read_text())  # nor did it give the other's back


@pytest.mark.parametrize("content", ["", "0123456789abcdef", "[]", '{"holder": 3}', '{"holder": {"pid": 1}}', "\0\xff"])
def test_what_names_nobody_holds_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "claim").write_text(content)
    with Lease.held(tmp_path, Reporter()) as lease:
        lease.check()
