"""A run's Ray metrics, which every node's Prometheus endpoint serves with the prefix `ray_`.

Training steps record nothing. The driver records events, and workers record requests to teachers: a few microseconds every
`log_every` or `prefetch_steps` steps. A run without Ray (`training.workers=0`) has no metrics.
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
_SINGLE_GROUP = "student"
"""Value of the tag `group` in runs without groups."""
_DEPTH, _EMBEDDED, _ANSWER = "distcse_teacher_queue_depth", "distcse_rows_embedded", "distcse_teacher_answer_seconds"

GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "distcse_step": ("Completed steps", ()),
    "distcse_steps_per_second": ("Steps per second since the last report, without dev scores and checkpoints", ()),
    "distcse_loss": ("Mean of a loss term since the last report", ("part",)),
    "distcse_learning_rate": ("Learning rate", ()),
    "distcse_teacher_wait_share": ("Fraction of the step time that rank 0 waited for teachers, 0 to 1", ()),
    "distcse_dev_score": ("Dev score", ()),
    "distcse_best_dev_score": ("Best dev score so far", ()),
    "distcse_table_hit_rate": ("Fraction of a teacher's rows that existed in its table, 0 to 1", ("teacher",)),
    "distcse_phase": ("Index of a mutual distillation group's current phase, from 0", ()),
    _DEPTH: (
        "Blocks of lists that a worker has requested and not received",
        ("teacher", "worker"),
    ),
}
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    _EMBEDDED: ("Rows that a teacher has embedded", ("teacher",)),
}
HISTOGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    _ANSWER: ("Time from the request for a block of lists to its arrival", ("teacher",)),
}
"""Maps metric names to their description and their tags other than `run` and `group`."""
_BUCKETS_S = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30]
_REFRESH_S = 1.0
"""Seconds between two refreshes; Ray exports metrics less often."""


class PersistentGauges:
    """Gauges that keep their values, although Ray drops a gauge that is not set for two export intervals.

    Args:
        names: Keys of `GAUGES`.
        tags: Tags of all these gauges.
    """

    def __init__(self, names: list[str], tags: Mapping[str, str]) -> None:
        self._gauges = {name: Gauge(name, *_describe(GAUGES[name])) for name in names}
        self._tags = dict(tags)
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        _refresher.add(self)

    def set(self, name: str, value: float, **tags: str) -> None:
        """Set a gauge; it keeps this value until it is set again or this object is deleted."""
        self._values[name, frozenset(tags.items())] = value
        self._gauges[name].set(value, {**self._tags, **tags})

    def refresh(self) -> None:
        """Set all gauges to their current values."""
        for (name, tags), value in list(self._values.items()):
            self._gauges[name].set(value, {**self._tags, **dict(tags)})


class RunMetrics:
    """Records a run's events as metrics.

    Args:
        run: Name of the run's folder, the tag `run`.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges = PersistentGauges([name for name in GAUGES if name != _DEPTH], {"run": run})
        self._embedded = Counter(_EMBEDDED, *_describe(COUNTERS[_EMBEDDED]))
        self._counted: dict[str, int] = {}

    def on_event(self, event: Event) -> None:
        """Record an event's values; ignore events without any."""
        group = _SINGLE_GROUP
        if isinstance(event, GroupEvent):
            group, event = event.group, event.event
        if isinstance(event, StepReport):
            self._record_steps(event, group)
        elif isinstance(event, DevScore):
            self._gauges.set("distcse_dev_score", event.score, group=group)
            self._gauges.set("distcse_best_dev_score", event.best, group=group)
        elif isinstance(event, StageProgress) and event.name.startswith("teacher "):
            self._record_table(event, group)
        elif isinstance(event, GroupActivity) and event.phase_index is not None:
            self._gauges.set("distcse_phase", event.phase_index, group=group)

    def _record_steps(self, event: StepReport, group: str) -> None:
        self._gauges.set("distcse_step", event.step, group=group)
        self._gauges.set("distcse_learning_rate", event.lr, group=group)
        if event.seconds:
            self._gauges.set("distcse_steps_per_second", 1 / event.seconds, group=group)
            self._gauges.set("distcse_teacher_wait_share", event.teacher_wait_s / event.seconds, group=group)
        for part, value in event.losses.items():
            self._gauges.set("distcse_loss", value, group=group, part=part)

    def _record_table(self, event: StageProgress, group: str) -> None:
        teacher = event.name.removeprefix("teacher ")
        new_rows = event.done - self._counted.get(teacher, 0)
        if new_rows > 0:
            self._embedded.inc(new_rows, {"run": self._run, "group": group, "teacher": teacher})
            self._counted[teacher] = event.done
        if event.reused is not None:
            hit_rate = event.reused / (event.done + event.reused)
            self._gauges.set("distcse_table_hit_rate", hit_rate, group=group, teacher=teacher)


def metered(reporter: Reporter, run: str) -> Reporter:
    """Return a reporter that also records events as metrics of a run. Ray must be initialized.

    Args:
        reporter: The reporter to forward events to.
        run: Name of the run's folder.
    """
    metrics = RunMetrics(run)

    def emit(event: Event) -> None:
        metrics.on_event(event)
        reporter.emit(event)

    return Reporter(emit, reporter.stop_requested)


class QueueMetrics:
    """Records a worker's number of pending requests to one teacher, and the time that each takes.

    Args:
        run: Name of the run's folder.
        teacher: The teacher's index in the recipe.
        worker: The worker's rank.
    """

    def __init__(self, run: str, teacher: int, worker: int) -> None:
        tags = {"run": run, "group": _SINGLE_GROUP, "teacher": str(teacher)}
        self._gauges = PersistentGauges([_DEPTH], {**tags, "worker": str(worker)})
        description, keys = _describe(HISTOGRAMS[_ANSWER])
        self._seconds = Histogram(_ANSWER, description, _BUCKETS_S, keys).set_default_tags(tags)
        self._pending = 0
        self._lock = threading.Lock()

    def track(self, answer: Future[Any]) -> None:
        """Count a request as pending from now until its answer arrives."""
        started = time.perf_counter()
        self._change_pending(1)

        def on_done(_: Future[Any]) -> None:
            self._seconds.observe(time.perf_counter() - started)
            self._change_pending(-1)

        answer.add_done_callback(on_done)

    def _change_pending(self, change: int) -> None:
        with self._lock:
            self._pending += change
            self._gauges.set(_DEPTH, self._pending)


def _describe(metric: tuple[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...]]:
    description, tags = metric
    return description, (*_TAGS, *tags)


class _GaugeRefresher:
    """Sets a process's gauges again every second, on one thread that ends when all `PersistentGauges` are deleted."""

    def __init__(self) -> None:
        self._gauge_sets: WeakSet[PersistentGauges] = WeakSet()
        self._is_running = False
        self._lock = threading.Lock()

    def add(self, gauges: PersistentGauges) -> None:
        with self._lock:
            self._gauge_sets.add(gauges)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="metrics", daemon=True).start()

    def _run(self) -> None:
        while self._refresh_all():
            time.sleep(_REFRESH_S)

    def _refresh_all(self) -> bool:
        with self._lock:
            gauge_sets = list(self._gauge_sets)
            self._is_running = bool(gauge_sets)
        if ray.is_initialized():
            for gauges in gauge_sets:
                gauges.refresh()
        return bool(gauge_sets)


_refresher = _GaugeRefresher()
