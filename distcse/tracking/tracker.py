"""What a tracker is to us, and a thread for each: one that is slow, or fails, is no concern of the run's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Ending = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True)
class Tracked:
    """The run, as trackers are told of it."""

    folder: Path
    settings: Mapping[str, Any]
    """The recipe's, by path."""
    recipe: str
    """The same as YAML."""

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return self.folder.name


class Tracker(Protocol):
    """A tracker that has begun, or gone on with, its own run."""

    def figures(self, values: Mapping[str, float], step: int) -> None:
        """Take numbers by name."""
        ...

    def end(self, ending: Ending) -> None:
        """Nothing more will come."""
        ...


class Line:
    """The line to one tracker: what is told goes into a queue, which a thread of its own empties.

    Args:
        name: The tracker's, as recipes have it.
        begin: Begins the tracker, or goes on with what it began in an earlier start of the run.
    """

    def __init__(self, name: str, begin: Callable[[], Tracker]) -> None:
        self.name = name
        self.failure: str | None = None
        """Why the tracker was left; None where it was not."""
        self._begin = begin
        self._waiting: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"track {name}", daemon=True)
        self._thread.start()

    def tell(self, what: Callable[[Tracker], None]) -> None:
        """Have something told, some time; at once nothing is done."""
        if self.failure is None:
            self._waiting.put(what)

    def close(self, patience: float) -> None:
        """Wait until all is told, for so many seconds at most; what then still waits is lost, and the tracker left."""
        self._waiting.put(None)
        self._thread.join(patience)
        if self._thread.is_alive():
            self.failure = self.failure or f"it did not take everything within {patience:g} s of the run's end"

    def _work(self) -> None:
        try:
            tracker = self._begin()
            while (what := self._waiting.get()) is not None:
                what(tracker)
        except BaseException as failed:  # whatever a client raises, its own ways to exit among it: the run goes on
            self.failure = f"{type(failed).__name__}: {' '.join(str(failed).split())[:300]}"
