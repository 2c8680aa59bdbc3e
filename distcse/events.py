"""Events of a run. Workers emit them; terminal views, logs and callbacks listen."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from distcse.errors import StoppedEarlyError

T = TypeVar("T")
CHUNK = 8192
"""Sentences or pairs that are read between two stop checks: a fraction of a second."""


@dataclass(frozen=True)
class StageProgress:
    """Progress of one stage of the run, from `done == 0` until `done == total` or `finished`."""

    name: str
    done: int
    total: int | None
    unit: str
    finished: bool = False
    note: str = ""
    reused: int | None = None
    """For a table of embeddings, once complete: the number of rows that existed before, in addition to `done`."""


@dataclass(frozen=True)
class StepReport:
    """Training progress: means over the steps since the previous report."""

    step: int
    total: int
    losses: dict[str, float]
    lr: float
    seconds: float
    """Wall time per step."""
    teacher_wait_s: float
    """Part of `seconds` that the worker waited for teachers."""


@dataclass(frozen=True)
class DevScore:
    """Dev score at a step, and the best score so far."""

    step: int
    total: int
    """Number of training steps of the run."""
    name: str
    score: float
    best: float
    best_step: int
    blocked_s: float = 0.0
    """Seconds that training stopped for the evaluation."""


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is complete."""

    step: int
    folder: str


@dataclass(frozen=True)
class LogMessage:
    """One line for the user."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class GroupActivity:
    """A group of a mutual distillation has started an activity."""

    phase: str
    activity: str
    """`preparing`, `training`, `scoring`, `waiting`, `finished` or `dropped`."""
    waiting_for: list[str] = field(default_factory=list)
    """Groups whose scores are missing."""
    phase_index: int | None = None
    """Index of the phase among all phases, from 0; None outside of phases."""


@dataclass(frozen=True)
class WorkersAssigned:
    """A group of a mutual distillation works with another number of the shared workers from now on."""

    workers: int
    """0 where it has given them back."""


@dataclass(frozen=True)
class TrialUpdate:
    """State of a sweep's trial."""

    trial: str
    status: str
    """`running`, `finished`, `stopped`, `diverged` or `failed`."""
    progress: float
    """Percentage of its training steps."""
    score: float | None
    """Latest dev score."""
    best: float | None
    """Best dev score."""
    values: dict[str, Any]
    """Searched values, by recipe key."""
    reason: str = ""
    """Error message of a trial that diverged or failed."""


RunEvent = (
    StageProgress | StepReport | DevScore | CheckpointSaved | LogMessage | GroupActivity | WorkersAssigned | TrialUpdate
)


@dataclass(frozen=True)
class GroupEvent:
    """An event of one of several concurrent groups."""

    group: str
    event: RunEvent


Event = RunEvent | GroupEvent
Listener = Callable[[Event], None]


def to_json_line(event: Event) -> str:
    """Format an event as one line of JSON with time, class, group and fields."""
    group = {}
    if isinstance(event, GroupEvent):
        group, event = {"group": event.group}, event.event
    return json.dumps({"time": round(time.time(), 3), "event": type(event).__name__, **group, **asdict(event)})


def ignore(event: Event) -> None:
    """Discard an event: the listener of runs without a view."""


def combine_listeners(*listeners: Listener) -> Listener:
    """Return a thread-safe listener that passes one event after the other to all listeners."""
    lock = threading.RLock()  # reentrant, because a listener may emit an event

    def emit(event: Event) -> None:
        with lock:
            for listener in listeners:
                listener(event)

    return emit


@dataclass(frozen=True)
class Reporter:
    """A run's connection to its caller: it emits events and queries stop requests."""

    emit: Listener = ignore
    stop_requested: Callable[[], bool] = field(default=lambda: False)

    def warn(self, text: str) -> None:
        """Emit a warning."""
        self.emit(LogMessage(text, warning=True))

    def check_stop(self, place: str) -> None:
        """End work at a stop request. All that can take more than five seconds calls it between its batches or shards.

        Training alone does not: it first writes a checkpoint.
        """
        if self.stop_requested():
            raise StoppedEarlyError(f"stopped {place}; what is stored is kept")

    def advance(self, name: str, done: int, total: int | None, unit: str) -> None:
        """Report the progress of a stage between two batches or shards, and end it at a stop request."""
        self.emit(StageProgress(name, done, total, unit))
        self.check_stop(f"in {name} after {done:,}{'' if total is None else f' of {total:,}'} {unit}")

    def found(self, stage: str, note: str) -> None:
        """Report a stage that is done at once, such as a check, with what it found."""
        self.emit(StageProgress(stage, 1, 1, "", finished=True, note=note))

    def follow(self, items: Iterable[T], name: str) -> Iterator[T]:
        """Yield the items of a long stream, and end it at a stop request."""
        for done, item in enumerate(items):
            if done % CHUNK == 0:
                self.check_stop(f"in {name} after {done:,} items")
            yield item

    def of_group(self, name: str) -> Reporter:
        """Return a reporter that wraps each event in a `GroupEvent` with this name, unless it is in one already."""

        def emit(event: Event) -> None:
            self.emit(event if isinstance(event, GroupEvent) else GroupEvent(name, event))

        return Reporter(emit, self.stop_requested)


class WaitWarning:
    """Warns once of a wait that takes long."""

    def __init__(self, reporter: Reporter, after_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._reporter, self._after_s, self._clock = reporter, after_s, clock
        self.restart()

    def restart(self) -> None:
        """Count a new wait from now on."""
        self._began, self._has_warned = self._clock(), False

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
            self._reporter.warn(text)
