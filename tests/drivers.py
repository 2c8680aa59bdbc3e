"""Drivers of mutual distillations: `distcse train` in a process, which is stopped or killed while groups train."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.commands import TRAIN, user_environment
from tests.conftest import ROOT


class Driver:
    """A running `distcse train`, and the folder of its run.

    Args:
        arguments: Arguments of the command.
        environment: Environment variables that name a cluster. Default: none, the driver starts Ray on this machine.
    """

    def __init__(self, arguments: list[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [*TRAIN, *arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=user_environment(**(environment or {})),
            cwd=ROOT,
        )
        self.run = Path()

    def wait_for_steps(self, phase: str) -> None:
        """Wait until a group has taken a step of a phase."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if named := re.search(r"run directory (/\S+)", line):
                self.run = Path(named[1])
            if f"{phase} training" in line:
                break
        for _ in range(600):
            phases: dict[str, str] = {}
            for line in (self.run / "events.jsonl").read_text().splitlines(keepends=True):
                if not line.endswith("\n"):
                    break  # it is being written
                event: Mapping[str, str] = json.loads(line)
                if event["event"] == "GroupActivity":
                    phases[event["group"]] = event["phase"]
                if event["event"] == "StepReport" and phases.get(event["group"]) == phase:
                    return
            time.sleep(0.1)
        raise AssertionError(f"no step of {phase}")

    def end(self, stop: signal.Signals | None = None, timeout_s: float = 120) -> str:
        """Send a signal, wait for the end, and return what was written to stderr meanwhile; check the exit status.

        Args:
            stop: The signal. Default: none, the driver ends by itself, without an error.
            timeout_s: Seconds until the wait fails.
        """
        if stop is not None:
            self._process.send_signal(stop)
        _, errors = self._process.communicate(timeout=timeout_s)
        expected = 0 if stop is None else 130 if stop == signal.SIGTERM else -stop
        assert self._process.returncode == expected, errors
        return errors

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.communicate()
