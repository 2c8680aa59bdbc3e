"""A warning where a run waits for the cluster, so that nobody takes the wait for work."""

from __future__ import annotations

import time
from collections.abc import Callable

from distcse.events import LogMessage, Reporter


class WaitWarning:
    """Warns once of a wait that takes long.

    Args:
        reporter: Receives the warning.
        after_s: Seconds of waiting after which it is due. Default: 30.
        clock: Returns seconds. Default: the time.
    """

    def __init__(self, reporter: Reporter, after_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._reporter, self._after_s, self._clock = reporter, after_s, clock
        self._began, self._has_warned = clock(), False

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return self._clock() - self._began

    @property
    def is_due(self) -> bool:
        """Whether `check` would emit the warning."""
        return self.waited_s > self._after_s and not self._has_warned

    def check(self, text: str) -> None:
        """Emit the warning if it is due. Call it repeatedly during the wait."""
        if self.is_due:
            self._has_warned = True
            self._reporter.emit(LogMessage(text, warning=True))
