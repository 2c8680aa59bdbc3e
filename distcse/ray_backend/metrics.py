"""What a run tells, as Ray metrics: every node's Prometheus endpoint serves them, with `ray_` before the name.

Nothing is recorded in a step. The driver records events as they come in, a worker the blocks of lists it asks for: a few
microseconds every `log_every` or `block_steps` steps. A run without Ray (`training.workers=0`) has no metrics.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from distcse.events import DevScore, Event, GroupActivity, GroupEvent, Reporter, StageProgress, StepReport

_TAGS = ("run", "group")
_ALONE = "student"
"""The group of a run that has none."""
_DEPTH, _EMBEDDED, _ANSWER = "distcse_teacher_queue_depth", "distcse_rows_embedded", "distcse_teacher_answer_seconds"

GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "distcse_step": ("Steps done", ()),
    "distcse_steps_per_second": ("Steps a second since the last report, dev scores and checkpoints apart", ()),
    "distcse_loss": ("Mean of a part of the loss since the last report", ("part",)),
    "distcse_learning_rate": ("Learning rate", ()),
    "distcse_teacher_wait_share": ("Share of the steps' time that the first worker waited for teachers, 0 to 1", ()),
    "distcse_dev_score": ("Dev score", ()),
    "distcse_best_dev_score": ("Best dev score so far", ()),
    "distcse_table_hit_rate": ("Share of a teacher's rows that were in its table already, 0 to 1", ("teacher",)),
    "distcse_phase": ("Phase that a group of a mutual distillation has reached, from 0", ()),
    _DEPTH: (
        "Blocks of lists that a worker has asked for and not been given",
        ("teacher", "worker"),
    ),
}
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    _EMBEDDED: ("Rows that went through a teacher", ("teacher",)),
}
HISTOGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    _ANSWER: ("From the asking for a block of lists to its coming", ("teacher",)),
}
"""Name to description and tags beside `run` and `group`."""
_SECONDS = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30]
_PERIOD = 1.0
"""Seconds between two repetitions; Ray's own interval is no shorter."""


class HeldGauges:
    """Gauges that keep their values: Ray forgets one that nobody has set for two of its export intervals.

    Args:
        names: Keys of `GAUGES`.
        tags: Tags that they all have.
    """

    def __init__(self, names: list[str], tags: Mapping[str, str]) -> None:
        self._gauges = {name: Gauge(name, *_described(GAUGES[name])) for name in names}
        self._tags = dict(tags)
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        _pulse.add(self)

    def set(self, name: str, value: float, **tags: str) -> None:
        """Set a gauge, until it is set again or this is forgotten."""
        self._values[name, frozenset(tags.items())] = value
        self._gauges[name].set(value, {**self._tags, **tags})

    def repeat(self) -> None:
        """Set all gauges to what they are."""
        for (name, tags), value in list(self._values.items()):
            self._gauges[name].set(value, {**self._tags, **dict(tags)})


class RunMetrics:
    """Turns a run's events into metrics.

    Args:
        run: Name of the run's folder, the tag `run`.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges = HeldGauges([name for name in GAUGES if name != _DEPTH], {"run": run})
        self._embedded = Counter(_EMBEDDED, *_described(COUNTERS[_EMBEDDED]))
        self._counted: dict[str, int] = {}

    def on_event(self, event: Event) -> None:
        """Record what an event says; events that hold no figure are passed over."""
        group = _ALONE
        if isinstance(event, GroupEvent):
            group, event = event.group, event.event
        if isinstance(event, StepReport):
            self._steps(event, group)
        elif isinstance(event, DevScore):
            self._gauges.set("distcse_dev_score", event.score, group=group)
            self._gauges.set("distcse_best_dev_score", event.best, group=group)
        elif isinstance(event, StageProgress) and event.name.startswith("teacher "):
            self._table(event, group)
        elif isinstance(event, GroupActivity) and event.number is not None:
            self._gauges.set("distcse_phase", event.number, group=group)

    def _steps(self, event: StepReport, group: str) -> None:
        self._gauges.set("distcse_step", event.step, group=group)
        self._gauges.set("distcse_learning_rate", event.lr, group=group)
        if event.seconds:
            self._gauges.set("distcse_steps_per_second", 1 / event.seconds, group=group)
            self._gauges.set("distcse_teacher_wait_share", event.waited / event.seconds, group=group)
        for part, value in event.losses.items():
            self._gauges.set("distcse_loss", value, group=group, part=part)

    def _table(self, event: StageProgress, group: str) -> None:
        teacher = event.name.removeprefix("teacher ")
        more = event.done - self._counted.get(teacher, 0)
        if more > 0:
            self._embedded.inc(more, {"run": self._run, "group": group, "teacher": teacher})
            self._counted[teacher] = event.done
        if event.reused is not None:
            share = event.reused / (event.done + event.reused)
            self._gauges.set("distcse_table_hit_rate", share, group=group, teacher=teacher)


def metered(reporter: Reporter, run: str) -> Reporter:
    """A reporter whose events are recorded as a run's metrics too. Wants Ray to be up."""
    metrics = RunMetrics(run)

    def post(event: Event) -> None:
        metrics.on_event(event)
        reporter.emit(event)

    return Reporter(post, reporter.stop_requested)


class Queue:
    """How many blocks a worker waits for from one teacher, and how long each took to come.

    Args:
        run: Name of the run's folder.
        teacher: The teacher's number in the recipe.
        worker: The worker's rank.
    """

    def __init__(self, run: str, teacher: int, worker: int) -> None:
        tags = {"run": run, "group": _ALONE, "teacher": str(teacher)}
        self._gauges = HeldGauges([_DEPTH], {**tags, "worker": str(worker)})
        told, keys = _described(HISTOGRAMS[_ANSWER])
        self._seconds = Histogram(_ANSWER, told, _SECONDS, keys).set_default_tags(tags)
        self._waiting = 0
        self._lock = threading.Lock()

    def track(self, answer: Future[Any]) -> None:
        """Count a block as asked for now, and as given when its answer is there."""
        began = time.perf_counter()
        self._count(1)

        def given(_: Future[Any]) -> None:
            self._seconds.observe(time.perf_counter() - began)
            self._count(-1)

        answer.add_done_callback(given)

    def _count(self, change: int) -> None:
        with self._lock:
            self._waiting += change
            self._gauges.set(_DEPTH, self._waiting)


def _described(metric: tuple[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...]]:
    told, tags = metric
    return told, (*_TAGS, *tags)


class _Pulse:
    """Repeats gauges every second for as long as somebody else holds them: one thread for all of a process."""

    def __init__(self) -> None:
        self._held: WeakSet[HeldGauges] = WeakSet()
        self._beats = False
        self._lock = threading.Lock()

    def add(self, gauges: HeldGauges) -> None:
        with self._lock:
            self._held.add(gauges)
            if not self._beats:
                self._beats = True
                threading.Thread(target=self._beat, name="metrics", daemon=True).start()

    def _beat(self) -> None:
        while self._repeat():
            time.sleep(_PERIOD)

    def _repeat(self) -> bool:
        with self._lock:
            held = list(self._held)
            self._beats = bool(held)
        if ray.is_initialized():
            for gauges in held:
                gauges.repeat()
        return bool(held)


_pulse = _Pulse()
