"""What the commands have in common: how they tell, how they end, and what Ctrl-C and SIGTERM mean to them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from distcse.errors import DistcseError, RecipeError, StoppedEarlyError

INTERRUPTED = 130
"""Exit status of a command that was asked to stop."""

# Ray's job supervisor sets the first for a job's process, and reads the second from its own environment, which the job inherits.
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_RAY_WAITS = "RAY_JOB_STOP_WAIT_TIME_S"

STATUSES = "Exit status: 0 done, 1 failed, 2 a mistake in what was asked, 130 interrupted."


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """`--quiet` and `--json`, alike for all commands."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-q", "--quiet", action="store_true", help="no progress: warnings and the results alone")
    how.add_argument(
        "--json", action="store_true", help="for programs: every event and result as JSON, one a line, on stdout"
    )


def exit_status(work: Callable[[], int], kept: str, as_json: bool = False) -> int:
    """Do a command's work; an error is one line on stderr.

    Args:
        work: Returns the exit status where nothing went wrong.
        kept: What a second Ctrl-C leaves.
        as_json: Tell an error on stdout too, as an object like the others there.

    Returns:
        What `work` says; 1 where it failed, 2 for a mistake in what was asked, 130 where it was stopped without a new checkpoint.
    """
    try:
        return work()
    except DistcseError as mistake:
        sys.stderr.write(f"distcse: {mistake.coded_message}\n")
        if as_json:
            told = {
                "event": "Error",
                "code": mistake.code,
                "kind": type(mistake).__name__,
                "message": str(mistake),
            }
            sys.stdout.write(json.dumps(told) + "\n")
        if isinstance(mistake, StoppedEarlyError):
            return INTERRUPTED
        return 2 if isinstance(mistake, RecipeError) else 1
    except KeyboardInterrupt:
        sys.stderr.write(f"distcse: stopped at once; {kept}\n")
        return INTERRUPTED


class StopOnSignal:
    """The first Ctrl-C (or SIGTERM) asks the run for a checkpoint and an end; the second ends it at once."""

    def __init__(self) -> None:
        self._wished = False

    def stop_requested(self) -> bool:
        """Whether a signal has come."""
        return self._wished

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._heard)

    def __exit__(self, *raised: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._wished:
            raise KeyboardInterrupt
        self._wished = True
        sys.stderr.write(f"stopping at the next report, with a checkpoint; {_limit(number)}\n")


def _limit(number: int) -> str:
    """What ends a run before its next report."""
    if number == signal.SIGTERM and _RAY_JOB in os.environ:
        seconds = os.environ.get(_RAY_WAITS, "3")
        return f"Ray kills a stopped job after {seconds} s ({_RAY_WAITS}): without a new checkpoint by then, the last one stays"
    return "press Ctrl-C again to stop at once"
