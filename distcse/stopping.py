"""What Ctrl-C and SIGTERM mean to the front doors."""

from __future__ import annotations

import signal
import sys
from types import FrameType

INTERRUPTED = 130
"""Exit status of a run that was asked to stop."""


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
