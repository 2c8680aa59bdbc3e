"""What the commands have in common: how they end, and what Ctrl-C and SIGTERM mean to them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

from distcse.errors import DistcseError, RecipeError

INTERRUPTED = 130
"""Exit status of a command that was asked to stop."""


def exit_status(work: Callable[[], int], kept: str) -> int:
    """Do a command's work; an error is one line on stderr.

    Args:
        work: Returns the exit status where nothing went wrong.
        kept: What a second Ctrl-C leaves.

    Returns:
        What `work` says; 1 where it failed, 2 for a mistake in what was asked, 130 where it was stopped at once.
    """
    try:
        return work()
    except DistcseError as mistake:
        sys.stderr.write(f"distcse: {mistake}\n")
        return 2 if isinstance(mistake, RecipeError) else 1
    except KeyboardInterrupt:
        sys.stderr.write(f"distcse: stopped at once; {kept}\n")
        return INTERRUPTED


class StopOnSignal:
    """The first Ctrl-C (or SIGTERM) asks the run for a checkpoint and an end; the second ends it at once."""

    def __init__(self) -> None:
        self._wished = False

    def wished(self) -> bool:
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
        sys.stderr.write("stopping at the next report, with a checkpoint; press Ctrl-C again to stop at once\n")
