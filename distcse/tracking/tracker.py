"""The interface of a tracker, and a thread per tracker, so that a slow or failing one does not affect the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from distcse.events import Listener, LogMessage

T = TypeVar("T")
RunStatus = Literal["finished", "interrupted", "failed"]
_CLOSE_TIMEOUT_S = 30.0
"""Seconds that a finished run waits for each tracker."""


@dataclass(frozen=True)
class RunInfo:
    """Description of the run for trackers."""

    folder: Path
    settings: Mapping[str, Any]
    """The recipe's values by key; of a trial, only the searched ones."""
    recipe: str
    """The recipe as YAML."""
    sweep: str = ""
    """Name of the sweep's folder, if the run is one of its trials."""

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


class TrackerThread(Generic[T]):
    """A thread that calls one tracker; calls are queued.

    Args:
        name: Name of the tracker in recipes.
        open_tracker: Opens the tracker, and continues its run from an earlier start.
    """

    def __init__(self, name: str, open_tracker: Callable[[], T]) -> None:
        self.name = name
        self.failure: str | None = None
        """Error that stopped the tracker; None if there was none."""
        self._open_tracker = open_tracker
        self._calls: queue.SimpleQueue[Callable[[T], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"track {name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[T], None]) -> None:
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


class TrackerThreads(Generic[T]):
    """The threads of all trackers; warns once of each that failed. Its methods may be called by several threads.

    Args:
        threads: The threads.
        emit: Receives one warning for each tracker that failed.
    """

    def __init__(self, threads: Sequence[TrackerThread[T]], emit: Listener) -> None:
        self._threads = threads
        self._emit = emit
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._threads)

    def submit(self, call: Callable[[T], None]) -> None:
        """Queue a call of every tracker; returns immediately."""
        for thread in self._threads:
            thread.submit(call)
        self._warn()

    def close(self, call: Callable[[T], None]) -> None:
        """Queue the last call of every tracker, and wait at most half a minute for each."""
        self.submit(call)
        for thread in self._threads:
            thread.close(_CLOSE_TIMEOUT_S)
        self._warn()

    def _warn(self) -> None:
        with self._lock:
            failed = [
                thread for thread in self._threads if thread.failure is not None and thread.name not in self._warned
            ]
            self._warned.update(thread.name for thread in failed)
        for thread in failed:
            text = f"loggers.{thread.name} failed; the run continues without it: {thread.failure}"
            self._emit(LogMessage(text, warning=True))
