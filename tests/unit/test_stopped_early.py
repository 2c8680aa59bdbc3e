"""A stop request during a wait for other processes: the run ends soon, with the exit status of Ctrl-C."""

from __future__ import annotations

from pathlib import Path

import pytest

from distcse.command import INTERRUPTED, exit_status
from distcse.errors import StoppedEarlyError
from distcse.events import Reporter
from distcse.runs.lease import Lease
from tests.failures import fails_with


def test_a_stop_request_during_a_wait_for_a_folder(tmp_path: Path) -> None:
    calls: list[bool] = []

    def stop_requested() -> bool:
        calls.append(True)
        return len(calls) > 1

    with (
        Lease.held(tmp_path, Reporter()),
        fails_with(StoppedEarlyError, "--resume"),
        Lease.held(tmp_path, Reporter(stop_requested=stop_requested), waits_for="embeds the same sentences"),
    ):
        pass


def test_commands_exit_with_the_status_of_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    def stop() -> int:
        raise StoppedEarlyError("stopped while no worker trained; the last checkpoint is kept")

    assert exit_status(stop, kept="all") == INTERRUPTED
    assert capsys.readouterr().err == (
        "distcse: [DCSE-X17] stopped while no worker trained; the last checkpoint is kept\n"
    )
