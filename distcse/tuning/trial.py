"""Trains one trial, by the same code as any run, and logs its dev scores: each trial has a tracker run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from distcse.errors import CheckpointError, DivergedError, StoppedEarlyError
from distcse.events import CheckpointSaved, Event, Reporter, TrialUpdate
from distcse.recipe import BaseRecipe, Sweep, recipe_yaml, with_values
from distcse.runs.backend import Backend, LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.experiment import experiment_of
from distcse.storage import ArtifactStore
from distcse.tracking.loggers import Opener, RunInfo, RunStatus, Tracker, openers_for_trials
from distcse.tracking.tracking import TrackerThread, TrackerThreads
from distcse.training.checkpoint_files import load_trainer_state
from distcse.training.checkpoints import CheckpointStore
from distcse.tuning.records import Status, Trial, TrialMetric, read_trial, readable_trials

Report = Callable[[dict[str, Any]], None]

WORST = -100.0
"""Dev score that a diverged trial reports; no real one is lower."""


@dataclass(frozen=True)
class TrialContext:
    """What all trials of a sweep share."""

    recipe: BaseRecipe
    """The recipe that trials run with their values, without a final evaluation (see `Trials.recipe`)."""
    trials: ArtifactStore
    """The folder with the trials' folders."""
    backend: Backend | None = None
    """The backend that trains; None is the trial's process."""
    keep_models: bool = False
    """Whether to keep each trial's model. Checkpoints are removed in any case."""
    exchanges_checkpoints: bool = False
    """Whether trials continue from each other's checkpoints (PBT): dev scores are then reported with their checkpoints. On a GPU
    with slow storage, some evaluations have none (see `CheckpointManager`), and are not reported."""


def run_trial(
    context: TrialContext,
    name: str,
    values: Mapping[str, Any],
    report: Report,
    donor: Path | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Trial:
    """Train the recipe with a set of values, or resume a trial that has already started.

    A trial that has ended, or whose values equal those of a finished trial, is not trained: its recorded scores are reported.

    Args:
        context: What all trials share.
        name: Name of the trial and of its folder.
        values: Values by recipe path.
        report: Called with `metrics_of` the trial after every dev score, with its `checkpoint` if trials exchange them. It may
            end the trial by raising an exception.
        donor: A checkpoint of another trial to continue from, or the last one that this trial reported, which is not taken if the
            trial has a newer one.
        stop_requested: Returns whether to write a checkpoint and stop. Called often. Default: never.

    Raises:
        StoppedEarlyError: It was asked to stop before its end. Called again, it continues from its last checkpoint.
    """
    folder = context.trials / name
    folder.path.mkdir(parents=True, exist_ok=True)
    trial = read_trial(folder)
    if trial is not None and trial.ended:
        return _replay(trial, report)
    has_same_values = trial is not None and trial.values == values
    if trial is None:
        trial = Trial(name, dict(values), started_at=time.time())
        if not context.exchanges_checkpoints and (equal := _find_equal_trial(context.trials, values)) is not None:
            trial = replace(equal, name=name, started_at=trial.started_at, reused_from=equal.name)
            trial.write(folder)
            return _replay(trial, report)
    else:
        trial = replace(trial, values=dict(values), num_starts=trial.num_starts + 1)
    seconds_before = trial.seconds
    recipe = with_values(context.recipe, values)
    directory = RunDirectory.begin(folder.path, recipe)  # a process of an earlier start writes nothing more
    checkpoints = CheckpointStore(directory.store)
    if donor is not None and not (has_same_values and _has_passed(donor, checkpoints)):
        checkpoints.adopt(donor)
        trial = replace(trial, metrics=_scores_in_checkpoint(trial, donor))
    trial.write(directory.store)

    trial_reporter = _TrialReporter(
        directory.store, trial, seconds_before, recipe, report, context.exchanges_checkpoints
    )
    try:
        reporter = Reporter(trial_reporter.on_event, stop_requested)
        result = experiment_of(recipe).trials.train(context.backend or LocalBackend(), reporter, directory)
        if result.interrupted:
            raise StoppedEarlyError(f"trial {name} was asked to stop; its last checkpoint is kept")
    except DivergedError as error:
        trial = replace(trial_reporter.trial, status="diverged", reason=error.coded_message)
    else:
        trial = replace(trial_reporter.trial, status="finished")
    trial.write(directory.store)
    clear(directory.store, keep_model=context.keep_models)
    if trial.status == "diverged":
        report({**metrics_of(trial), "dev": WORST, "best": WORST})
    return trial


def metrics_of(trial: Trial) -> dict[str, Any]:
    """Return the trial's last and best dev score as flat metrics for Ray Tune."""
    last, best = trial.metrics[-1] if trial.metrics else None, trial.best
    return {
        "dev": last.score if last else WORST,
        "best": best.score if best else WORST,
        "step": last.step if last else 0,
        "progress": int(last.progress) if last else 0,
        "seconds": last.seconds if last else 0.0,
    }


def clear(folder: ArtifactStore, keep_model: bool = False) -> None:
    """Remove files of an ended trial that are not read again."""
    for name in ["checkpoints", "ray", "groups", *([] if keep_model else ["model", "models"])]:
        (folder / name).delete_all()


def _replay(trial: Trial, report: Report) -> Trial:
    """Report the recorded scores, one after the other, and return the trial."""
    for number in range(len(trial.metrics)):
        report(metrics_of(replace(trial, metrics=trial.metrics[: number + 1])))
    if trial.status == "diverged":
        report({**metrics_of(trial), "dev": WORST, "best": WORST})
    return trial


def _has_passed(donor: Path, checkpoints: CheckpointStore) -> bool:
    """Return whether a trial's newest intact checkpoint is of a training that went through another checkpoint."""
    try:
        restored = checkpoints.restore()
    except CheckpointError:  # all are damaged
        return False
    passed = load_trainer_state(donor).scores
    return restored is not None and restored[0].scores[: len(passed)] == passed


def _scores_in_checkpoint(trial: Trial, donor: Path) -> list[TrialMetric]:
    """Return the trial's scores that are in a checkpoint; its other scores belong to weights that it has replaced."""
    scored = {(step, score) for step, score in load_trainer_state(donor).scores}
    return [entry for entry in trial.metrics if (entry.step, entry.score) in scored]


def _find_equal_trial(trials: ArtifactStore, values: Mapping[str, Any]) -> Trial | None:
    """Return a finished trial with the same values, or None."""
    equal = (t for t in readable_trials(trials) if t.values == values and t.status == "finished" and not t.reused_from)
    return next(equal, None)


class _TrialReporter:
    """Listens to a run's events, and records and reports its dev scores."""

    def __init__(
        self,
        folder: ArtifactStore,
        trial: Trial,
        seconds_before: float,
        recipe: BaseRecipe,
        report: Report,
        with_checkpoints: bool,
    ) -> None:
        self.trial = trial
        self._folder = folder
        self._report = report
        self._with_checkpoints = with_checkpoints
        self._seconds_before = seconds_before
        self._began = time.monotonic()
        self._scores = experiment_of(recipe).trials.scores(folder)

    def on_event(self, event: Event) -> None:
        for scored in self._scores(event):
            self._score(*scored)
        if self._with_checkpoints and isinstance(event, CheckpointSaved):
            upto = [metric for metric in self.trial.metrics if metric.step <= event.step]  # it may be reported late
            if upto and upto[-1].step == event.step:
                self._report({**metrics_of(replace(self.trial, metrics=upto)), "checkpoint": event.folder})

    def _score(self, step: int, progress: float, score: float) -> None:
        seconds = self._seconds_before + time.monotonic() - self._began
        self.trial = self.trial.with_score(TrialMetric(step, progress, score, seconds))
        self.trial.write(self._folder)
        if not self._with_checkpoints:
            self._report(metrics_of(self.trial))


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
