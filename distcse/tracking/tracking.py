"""Report a run's events as metrics to every logger, each in a thread: a slow or failing one does not affect the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from distcse.evaluation import Evaluation
from distcse.events import DevScore, Event, GroupActivity, GroupEvent, Listener, LogMessage, Reporter, StepReport
from distcse.recipe import BaseRecipe, recipe_yaml
from distcse.storage import ArtifactStore
from distcse.tracking.loggers import RunInfo, RunStatus, Tracker, openers_of

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 30.0
"""Seconds that a finished run waits for each tracker."""


class TrackerThread(Generic[T]):
    """A thread that calls one tracker; calls are queued."""

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
    """The threads of all trackers; warns once of each that failed. Its methods may be called by several threads."""

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


class Tracking:
    """A listener of events that logs metrics to trackers."""

    def __init__(self, threads: Sequence[TrackerThread[Tracker]], emit: Listener) -> None:
        self._threads = TrackerThreads(threads, emit)
        self._phases: dict[str, str] = {}
        self._lock = threading.Lock()  # groups emit from several threads
        self._last_step = 0
        self._status: RunStatus = "failed"  # until `end` is called

    def relay(self, reporter: Reporter) -> Reporter:
        """Return a reporter whose events are also logged to the trackers."""
        if not self._threads:
            return reporter

        def emit(event: Event) -> None:
            self.on_event(event)
            reporter.emit(event)

        return Reporter(emit, reporter.stop_requested)

    def on_event(self, event: Event) -> None:
        """Log the metrics of an event; names have group and phase as prefix, because each phase counts its steps from 0."""
        group = ""
        if isinstance(event, GroupEvent):
            group, event = event.group, event.event
        with self._lock:
            if isinstance(event, GroupActivity):
                self._phases[group] = event.phase
            elif isinstance(event, StepReport):
                self._log(self._prefix(group), _step_metrics(event), event.step)
            elif isinstance(event, DevScore):
                self._log(self._prefix(group), {"dev": event.score, "best_dev": event.best}, event.step)

    def end(self, interrupted: bool, evaluation: Evaluation | None) -> None:
        """Record how the run ended, and log the final evaluation at the last reported step, with overlaps above 0."""
        self._status = "interrupted" if interrupted else "finished"
        if evaluation is None:
            return
        metrics: dict[str, float] = {}
        for score in evaluation.scores:
            of = f"{score.suite}/{score.set}"
            metrics |= {f"{of}/{score.measure}/{model}": value for model, value in score.values.items()}
            metrics |= {f"{of}/overlap/{model}": share for model, share in evaluation.overlaps(score).items()}
        if metrics:
            self._log("final/", metrics, self._last_step)

    def close(self) -> None:
        """Finish all trackers; waits at most half a minute for each, and warns of those that failed."""
        status = self._status
        self._threads.close(lambda tracker: tracker.finish(status))

    def _prefix(self, group: str) -> str:
        parts = [group, self._phases.get(group, "")] if group else []
        return "".join(f"{part}/" for part in parts if part)

    def _log(self, prefix: str, metrics: Mapping[str, float], step: int) -> None:
        prefixed = {prefix + name: value for name, value in metrics.items()}
        self._last_step = max(self._last_step, step)
        self._threads.submit(lambda tracker: tracker.log_metrics(prefixed, step))


@contextmanager
def track_run(recipe: BaseRecipe, folder: ArtifactStore, emit: Listener) -> Iterator[Tracking]:
    """Open the recipe's trackers for the duration of its run."""
    run = RunInfo(folder, _flat(recipe.model_dump(mode="json")), recipe_yaml(recipe))
    openers = openers_of(recipe.loggers)
    trackers = Tracking([TrackerThread(name, partial(opener, run)) for name, opener in openers.items()], emit)
    try:
        yield trackers
    finally:
        trackers.close()


def _step_metrics(event: StepReport) -> dict[str, float]:
    result = {f"train/{part}": value for part, value in event.losses.items()}
    result["train/lr"] = event.lr
    if event.seconds:
        result["train/steps_per_second"] = 1 / event.seconds
        result["train/teacher_wait_share"] = event.teacher_wait_s / event.seconds
    return result


def _flat(nested: Any, path: str = "") -> dict[str, Any]:
    """Flatten a nested recipe into values by key."""
    if not isinstance(nested, dict | list) or not nested:
        return {path: nested}
    items = nested.items() if isinstance(nested, dict) else enumerate(nested)
    result: dict[str, Any] = {}
    for name, value in items:
        result |= _flat(value, f"{path}.{name}" if path else str(name))
    return result
