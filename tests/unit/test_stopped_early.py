"""A run that is asked to stop while it waits for others: it ends soon, with the exit status of Ctrl-C."""

from __future__ import annotations

from pathlib import Path

import pytest

from distcse.command import INTERRUPTED, exit_status
from distcse.errors import StoppedEarlyError
from distcse.events import Reporter
from distcse.runs.lease import Lease


def test_a_stop_while_another_process_works_in_a_folder(tmp_path: Path) -> None:
    asked: list[bool] = []

    def stop_requested() -> bool:
        asked.append(True)
        return len(asked) > 1

    with (
        Lease.held(tmp_path, Reporter()),
        pytest.raises(StoppedEarlyError, match="stopped while another process works there"),
        Lease.held(tmp_path, Reporter(stop_requested=stop_requested), waits_for="embeds the same sentences"),
    ):
        pass


def test_commands_exit_with_the_status_of_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped() -> int:
        raise StoppedEarlyError("stopped while no worker trained; the last checkpoint is kept")

    assert exit_status(stopped, kept="all") == INTERRUPTED
    assert capsys.readouterr().err == (
        "distcse: [DCSE-X17] stopped while no worker trained; the last checkpoint is kept\n"
    )
