"""The interface of a tracker, and a thread per tracker, so that a slow or failing one does not affect the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

RunStatus = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True)
class RunInfo:
    """Description of the run for trackers."""

    folder: Path
    settings: Mapping[str, Any]
    """The recipe's values by key."""
    recipe: str
    """The recipe as YAML."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.folder.name


class Tracker(Protocol):
    """A tracker with an open run."""

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics by name."""
        ...

    def finish(self, status: RunStatus) -> None:
        """Close the tracker's run."""
        ...


class TrackerThread:
    """A thread that calls one tracker; calls are queued.

    Args:
        name: Name of the tracker in recipes.
        open_tracker: Opens the tracker, and continues its run from an earlier start.
    """

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self.name = name
        self.failure: str | None = None
        """Error that stopped the tracker; None if there was none."""
        self._open_tracker = open_tracker
        self._calls: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"track {name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[Tracker], None]) -> None:
        """Queue a call of the tracker; returns immediately."""
        if self.failure is None:
            self._calls.put(call)

    def close(self, timeout_s: float) -> None:
        """Wait for the queued calls, and give up on the tracker after `timeout_s`."""
        self._calls.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.failure = self.failure or f"it did not finish within {timeout_s:g} s after the end of the run"

    def _work(self) -> None:
        try:
            tracker = self._open_tracker()
            while (call := self._calls.get()) is not None:
                call(tracker)
        except BaseException as error:  # clients may raise SystemExit too, and the run must continue
            self.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
