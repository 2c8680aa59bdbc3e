"""What a run tells, as Ray metrics: every node's Prometheus endpoint serves them, with `ray_` before the name.

Nothing is recorded in a step. The driver records events as they come in, a worker the blocks of lists it asks for: a few
microseconds every `log_every` or `block_steps` steps. A run without Ray (`training.workers=0`) has no metrics.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from distcse.events import DevScore, Doing, Event, InGroup, Stage, Steps, Watch

_TAGS = ("run", "group")
_ALONE = "student"
"""The group of a run that has none."""

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
    "distcse_teacher_queue_depth": (
        "Blocks of lists that a worker has asked for and not been given",
        ("teacher", "worker"),
    ),
}
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "distcse_rows_embedded": ("Rows that went through a teacher", ("teacher",)),
}
HISTOGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "distcse_teacher_answer_seconds": ("From the asking for a block of lists to its coming", ("teacher",)),
}
"""Name to description and tags beside `run` and `group`."""
_SECONDS = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30]


class RunMetrics:
    """Turns a run's events into metrics.

    Args:
        run: Name of the run's folder, the tag `run`.
    """

    def __init__(self, run: str) -> None:
        self._gauges = {name: Gauge(name, *_described(metric)) for name, metric in GAUGES.items()}
        name = "distcse_rows_embedded"
        self._embedded = Counter(name, *_described(COUNTERS[name]))
        self._counted: dict[str, int] = {}
        self._run = run

    def hear(self, event: Event) -> None:
        """Record what an event says; events that hold no figure are passed over."""
        group = _ALONE
        if isinstance(event, InGroup):
            group, event = event.group, event.event
        tags = {"run": self._run, "group": group}
        if isinstance(event, Steps):
            self._steps(event, tags)
        elif isinstance(event, DevScore):
            self._set("dev_score", event.score, tags)
            self._set("best_dev_score", event.best, tags)
        elif isinstance(event, Stage) and event.name.startswith("teacher "):
            self._table(event, {**tags, "teacher": event.name.removeprefix("teacher ")})
        elif isinstance(event, Doing) and event.number is not None:
            self._set("phase", event.number, tags)

    def _steps(self, event: Steps, tags: dict[str, str]) -> None:
        self._set("step", event.step, tags)
        self._set("steps_per_second", 1 / event.seconds if event.seconds else 0.0, tags)
        self._set("learning_rate", event.lr, tags)
        self._set("teacher_wait_share", event.waited / event.seconds if event.seconds else 0.0, tags)
        for part, value in event.losses.items():
            self._set("loss", value, {**tags, "part": part})

    def _table(self, event: Stage, tags: dict[str, str]) -> None:
        before = self._counted.get(event.name, 0)
        if event.done > before:
            self._embedded.inc(event.done - before, tags)
            self._counted[event.name] = event.done
        if event.reused is not None:
            rows = event.done + event.reused
            self._set("table_hit_rate", event.reused / rows if rows else 1.0, tags)

    def _set(self, name: str, value: float, tags: dict[str, str]) -> None:
        self._gauges[f"distcse_{name}"].set(value, tags)


def metered(watch: Watch, run: str) -> Watch:
    """A watch whose events are recorded as a run's metrics too. Wants Ray to be up."""
    metrics = RunMetrics(run)

    def post(event: Event) -> None:
        metrics.hear(event)
        watch.post(event)

    return Watch(post, watch.stop_wished)


class Queue:
    """How many blocks a worker waits for from one teacher, and how long each took to come.

    Args:
        run: Name of the run's folder.
        teacher: The teacher's number in the recipe.
        worker: The worker's rank.
    """

    def __init__(self, run: str, teacher: int, worker: int) -> None:
        tags = {"run": run, "group": _ALONE, "teacher": str(teacher)}
        name = "distcse_teacher_answer_seconds"
        told, keys = _described(HISTOGRAMS[name])
        self._seconds = Histogram(name, told, _SECONDS, keys).set_default_tags(tags)
        name = "distcse_teacher_queue_depth"
        self._depth = Gauge(name, *_described(GAUGES[name])).set_default_tags({**tags, "worker": str(worker)})
        self._asked = 0
        self._lock = threading.Lock()

    def watch(self, answer: Future[Any]) -> None:
        """Count a block as asked for now, and as given when its answer is there."""
        began = time.perf_counter()
        self._count(1)

        def given(_: Future[Any]) -> None:
            self._seconds.observe(time.perf_counter() - began)
            self._count(-1)

        answer.add_done_callback(given)

    def _count(self, change: int) -> None:
        with self._lock:
            self._asked += change
            self._depth.set(self._asked)


def _described(metric: tuple[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...]]:
    told, tags = metric
    return told, (*_TAGS, *tags)
