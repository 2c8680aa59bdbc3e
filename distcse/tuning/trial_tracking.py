"""Logs the trials of a sweep: each has a tracker run with its values as parameters and its dev scores as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from distcse.events import Event, Reporter, TrialUpdate
from distcse.recipe import Sweep, recipe_yaml, with_values
from distcse.tracking.loggers import Opener, RunInfo, RunStatus, Tracker, openers_for_trials
from distcse.tracking.tracking import TrackerThread, TrackerThreads
from distcse.tuning.records import Status, Trial, TrialMetric, read_trial, readable_trials
from distcse.tuning.trial import TrialContext

_STATUS: dict[Status, RunStatus] = {
    "running": "interrupted",
    "finished": "finished",
    "stopped": "finished",
    "diverged": "failed",
    "failed": "failed",
}


@contextmanager
def track_trials(sweep: Sweep, context: TrialContext, reporter: Reporter) -> Iterator[Reporter]:
    """Log the trials of a search, or the final runs, to the loggers of the search space."""
    if not sweep.loggers:
        yield reporter
        return
    earlier = readable_trials(context.trials)
    threads = TrackerThreads(
        [
            TrackerThread(name, partial(TrialRuns, opener, partial(_describe, context), earlier))
            for name, opener in openers_for_trials(sweep.loggers, sweep.name).items()
        ],
        reporter.emit,
    )

    def emit(event: Event) -> None:
        if isinstance(event, TrialUpdate) and (trial := read_trial(context.trials / event.trial)) is not None:
            threads.submit(lambda runs: runs.log(trial))
        reporter.emit(event)

    try:
        yield Reporter(emit, reporter.stop_requested)
    finally:
        threads.close(lambda runs: runs.finish())


class TrialRuns:
    """The tracker runs of all trials at one logger."""

    def __init__(self, open_tracker: Opener, describe: Callable[[Trial], RunInfo], earlier: list[Trial]) -> None:
        self._open_tracker = open_tracker
        self._describe = describe
        self._trackers: dict[str, Tracker] = {}
        self._ended = {trial.name for trial in earlier if trial.ended}
        self._logged = {_key(trial, metric) for trial in earlier for metric in trial.metrics}

    def log(self, trial: Trial) -> None:
        """Log the dev scores that are new, and close the tracker's run of a trial that has ended."""
        if trial.name in self._ended:
            return
        if trial.name not in self._trackers:
            self._trackers[trial.name] = self._open_tracker(self._describe(trial))
        tracker = self._trackers[trial.name]
        for number, metric in enumerate(trial.metrics, 1):
            if _key(trial, metric) not in self._logged:
                best = max(earlier.score for earlier in trial.metrics[:number])
                scores = {"dev": metric.score, "best_dev": best, "progress": metric.progress, "seconds": metric.seconds}
                tracker.log_metrics(scores, metric.step)
                self._logged.add(_key(trial, metric))
        if trial.ended:
            self._ended.add(trial.name)
            self._trackers.pop(trial.name).finish(_STATUS[trial.status])

    def finish(self) -> None:
        """Close the tracker runs of the trials that have not ended."""
        for tracker in self._trackers.values():
            tracker.finish("interrupted")
        self._trackers.clear()


def _key(trial: Trial, metric: TrialMetric) -> tuple[str, int, float]:
    return trial.name, metric.step, metric.score


def _describe(context: TrialContext, trial: Trial) -> RunInfo:
    recipe = recipe_yaml(with_values(context.recipe, trial.values))
    return RunInfo(context.trials / trial.name, trial.values, recipe, sweep=context.trials.parent.name)
