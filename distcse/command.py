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
    """Add `--quiet` and `--json`, which are the same for all commands."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-q", "--quiet", action="store_true", help="no progress: warnings and the results alone")
    how.add_argument(
        "--json", action="store_true", help="for programs: every event and result as JSON, one a line, on stdout"
    )


def exit_status(work: Callable[[], int], kept: str, as_json: bool = False) -> int:
    """Run a command and return its exit status; an error becomes one line on stderr.

    Args:
        work: Runs the command and returns its exit status.
        kept: What remains after a second Ctrl-C, for the message.
        as_json: Also print the error as a JSON object on stdout.

    Returns:
        The status of `work`; 1 for a failure, 2 for a mistake in the recipe or the arguments, 130 for a stop without a new
        checkpoint.
    """
    try:
        return work()
    except DistcseError as mistake:
        sys.stderr.write(f"distcse: {mistake.coded_message}\n")
        if as_json:
            error = {
                "event": "Error",
                "code": mistake.code,
                "kind": type(mistake).__name__,
                "message": str(mistake),
            }
            sys.stdout.write(json.dumps(error) + "\n")
        if isinstance(mistake, StoppedEarlyError):
            return INTERRUPTED
        return 2 if isinstance(mistake, RecipeError) else 1
    except KeyboardInterrupt:
        sys.stderr.write(f"distcse: stopped at once; {kept}\n")
        return INTERRUPTED


class StopOnSignal:
    """Handles Ctrl-C and SIGTERM: the first requests a checkpoint and a stop, the second stops at once."""

    def __init__(self) -> None:
        self._requested = False

    def stop_requested(self) -> bool:
        """Return whether a signal has arrived."""
        return self._requested

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def __exit__(self, *raised: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        sys.stderr.write(f"stopping at the next report, with a checkpoint; {_limit(number)}\n")


def _limit(number: int) -> str:
    """Describe what stops the run before its next report."""
    if number == signal.SIGTERM and _RAY_JOB in os.environ:
        seconds = os.environ.get(_RAY_WAITS, "3")
        return f"Ray kills a stopped job after {seconds} s ({_RAY_WAITS}): without a new checkpoint by then, the last one stays"
    return "press Ctrl-C again to stop at once"
