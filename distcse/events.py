"""What a run tells whoever watches it. Workers post events; the terminal, a log or a test listens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class StageProgress:
    """A part of the run: begun with `done == 0`, over when `done == total` (or when `finished` says so)."""

    name: str
    done: int
    total: int | None
    unit: str
    finished: bool = False
    note: str = ""
    reused: int | None = None
    """Of a table, when it is whole: rows that were there already, beside the `done` that were not."""


@dataclass(frozen=True)
class StepReport:
    """The student's progress: means over the steps since the last report."""

    step: int
    total: int
    losses: dict[str, float]
    lr: float
    seconds: float
    """Wall time of one step."""
    waited: float
    """Part of `seconds` spent waiting for teachers."""


@dataclass(frozen=True)
class DevScore:
    """The dev score at a step, and the best so far."""

    step: int
    total: int
    """Steps of the whole training."""
    name: str
    score: float
    best: float
    best_step: int
    is_kept: float = 0.0
    """Seconds that the training stood still for it."""


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is whole."""

    step: int
    folder: str


@dataclass(frozen=True)
class LogMessage:
    """One line a person should read."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class GroupActivity:
    """What a group of a mutual distillation has begun to do."""

    phase: str
    activity: str
    """preparing, training, scoring, waiting, finished or dropped."""
    waiting_for: list[str] = field(default_factory=list)
    """Groups whose scores are not there yet."""
    number: int | None = None
    """The phase's place among all phases, from 0; None where there is none."""


@dataclass(frozen=True)
class TrialUpdate:
    """Where a trial of a sweep stands."""

    trial: str
    status: str
    """running, finished, stopped, diverged or failed."""
    progress: float
    """Percent of its training."""
    score: float | None
    """Its last dev score."""
    best: float | None
    values: dict[str, Any]
    """By recipe path."""
    why: str = ""
    """What a trial that diverged or failed said."""


RunEvent = StageProgress | StepReport | DevScore | CheckpointSaved | LogMessage | GroupActivity | TrialUpdate


@dataclass(frozen=True)
class GroupEvent:
    """An event of one group of several that work side by side."""

    group: str
    event: RunEvent


Event = RunEvent | GroupEvent
Listener = Callable[[Event], None]


def as_line(event: Event) -> str:
    """An event as JSON in one line: when, which, in which group, and what it says."""
    group = {}
    if isinstance(event, GroupEvent):
        group, event = {"group": event.group}, event.event
    return json.dumps({"time": round(time.time(), 3), "event": type(event).__name__, **group, **asdict(event)})


def ignore(event: Event) -> None:
    """A listener for runs that nobody watches."""


def one_by_one(*listeners: Listener) -> Listener:
    """A listener that may be told by several threads, and tells others one event after the other."""
    turn = threading.RLock()  # a listener may tell something itself

    def tell(event: Event) -> None:
        with turn:
            for listener in listeners:
                listener(event)

    return tell


@dataclass(frozen=True)
class Reporter:
    """A run's connection to its caller: events out, a stop request in."""

    emit: Listener = ignore
    stop_requested: Callable[[], bool] = field(default=lambda: False)
