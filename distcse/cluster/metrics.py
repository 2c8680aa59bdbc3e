"""A run's Ray metrics, which every node's Prometheus endpoint serves with the prefix `ray_`.

Training steps record nothing. The driver records events, every `log_every` steps. A run without Ray (`training.workers=0`) has
no metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.util.metrics import Counter, Gauge

from distcse.devices.process import repeated
from distcse.events import DevScore, Event, GroupActivity, GroupEvent, Reporter, StageProgress, StepReport

_TAGS = ("run", "group")
_SINGLE_GROUP = "student"
"""Value of the tag `group` in runs without groups."""
_EMBEDDED = "distcse_rows_embedded"

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
}
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    _EMBEDDED: ("Rows that a teacher has embedded", ("teacher",)),
}
"""Maps metric names to their description and their tags other than `run` and `group`."""
_REFRESH_S = 1.0
"""Seconds between two refreshes; Ray exports metrics less often."""


class RunMetrics:
    """Records the events of a run, by its folder's name, as metrics."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges = {name: Gauge(name, text, (*_TAGS, *tags)) for name, (text, tags) in GAUGES.items()}
        text, tags = COUNTERS[_EMBEDDED]
        self._embedded = Counter(_EMBEDDED, text, (*_TAGS, *tags))
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self._counted: dict[str, int] = {}

    def on_event(self, event: Event) -> None:
        """Record an event's values; ignore events without any."""
        group = _SINGLE_GROUP
        if isinstance(event, GroupEvent):
            group, event = event.group, event.event
        if isinstance(event, StepReport):
            self._record_steps(event, group)
        elif isinstance(event, DevScore):
            self._set("distcse_dev_score", event.score, group=group)
            self._set("distcse_best_dev_score", event.best, group=group)
        elif isinstance(event, StageProgress) and event.name.startswith("teacher "):
            self._record_table(event, group)
        elif isinstance(event, GroupActivity) and event.phase_index is not None:
            self._set("distcse_phase", event.phase_index, group=group)

    def refresh(self) -> None:
        """Set all gauges to their current values: Ray drops a gauge that is not set for two export intervals."""
        for (name, tags), value in list(self._values.items()):
            self._gauges[name].set(value, dict(tags))

    def _set(self, name: str, value: float, **tags: str) -> None:
        tags["run"] = self._run
        self._values[name, frozenset(tags.items())] = value
        self._gauges[name].set(value, tags)

    def _record_steps(self, event: StepReport, group: str) -> None:
        self._set("distcse_step", event.step, group=group)
        self._set("distcse_learning_rate", event.lr, group=group)
        if event.seconds:
            self._set("distcse_steps_per_second", 1 / event.seconds, group=group)
            self._set("distcse_teacher_wait_share", event.teacher_wait_s / event.seconds, group=group)
        for part, value in event.losses.items():
            self._set("distcse_loss", value, group=group, part=part)

    def _record_table(self, event: StageProgress, group: str) -> None:
        teacher = event.name.removeprefix("teacher ")
        new_rows = event.done - self._counted.get(teacher, 0)
        if new_rows > 0:
            self._embedded.inc(new_rows, {"run": self._run, "group": group, "teacher": teacher})
            self._counted[teacher] = event.done
        if event.reused is not None:
            hit_rate = event.reused / (event.done + event.reused)
            self._set("distcse_table_hit_rate", hit_rate, group=group, teacher=teacher)


@contextmanager
def metered(reporter: Reporter, run: str) -> Iterator[Reporter]:
    """Context manager: a reporter that also records events as metrics of a run until the block ends. Ray must be initialized.

    Gauges keep their values during the block. Nothing here uses Ray afterwards: that would end the process if Ray is just
    being shut down.
    """
    metrics, is_open = RunMetrics(run), True

    def emit(event: Event) -> None:
        if is_open:
            metrics.on_event(event)
        reporter.emit(event)

    try:
        with repeated(metrics.refresh, _REFRESH_S, "metrics"):
            yield Reporter(emit, reporter.stop_requested)
    finally:
        is_open = False
