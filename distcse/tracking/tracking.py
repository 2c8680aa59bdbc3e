"""Events of a run in, figures out: to every tracker that the recipe names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distcse.evaluation import Evaluation
from distcse.events import DevScore, Event, GroupActivity, GroupEvent, Listener, LogMessage, Reporter, StepReport
from distcse.recipe import LoggersSection, MLflowSection, MutualRecipe, Recipe, WandbSection, recipe_yaml
from distcse.tracking.tracker import Ending, Line, Tracked, Tracker

_PATIENCE = 30.0
"""Seconds that a run which has ended waits for its trackers."""


class Tracking:
    """A listener of events that tells trackers.

    Args:
        lines: To each of them.
        post: Hears, once, of a tracker that is left.
    """

    def __init__(self, lines: list[Line], post: Listener) -> None:
        self._lines = lines
        self._post = post
        self._told: set[str] = set()
        self._phases: dict[str, str] = {}
        self._lock = threading.Lock()  # groups tell from threads of their own
        self._last = 0
        self._ending: Ending = "failed"  # until the run says otherwise

    def relay(self, reporter: Reporter) -> Reporter:
        """A reporter whose events trackers hear too."""
        if not self._lines:
            return reporter

        def post(event: Event) -> None:
            self.on_event(event)
            reporter.emit(event)

        return Reporter(post, reporter.stop_requested)

    def on_event(self, event: Event) -> None:
        """Pass on what an event says in figures; each phase of each group has its own, as its steps begin at 0."""
        group = ""
        if isinstance(event, GroupEvent):
            group, event = event.group, event.event
        with self._lock:
            if isinstance(event, GroupActivity):
                self._phases[group] = event.phase
            elif isinstance(event, StepReport):
                self._tell(self._place(group), _figures(event), event.step)
            elif isinstance(event, DevScore):
                self._tell(self._place(group), {"dev": event.score, "best_dev": event.best}, event.step)
            self._warn()

    def end(self, interrupted: bool, evaluation: Evaluation | None) -> None:
        """How the run ended, and what was measured then: at the step that was reported last."""
        self._ending = "interrupted" if interrupted else "finished"
        scores = evaluation.scores if evaluation is not None else ()
        figures = {
            f"{score.suite}/{score.set}/{score.measure}/{model}": value
            for score in scores
            for model, value in score.values.items()
        }
        if figures:
            self._tell("final/", figures, self._last)

    def close(self) -> None:
        """Wait for the trackers, half a minute at most for each."""
        ending = self._ending
        for line in self._lines:
            line.tell(lambda tracker: tracker.end(ending))
        for line in self._lines:
            line.close(_PATIENCE)
        self._warn()

    def _place(self, group: str) -> str:
        parts = [group, self._phases.get(group, "")] if group else []
        return "".join(f"{part}/" for part in parts if part)

    def _tell(self, place: str, figures: Mapping[str, float], step: int) -> None:
        named = {place + name: value for name, value in figures.items()}
        self._last = max(self._last, step)
        for line in self._lines:
            line.tell(lambda tracker: tracker.figures(named, step))

    def _warn(self) -> None:
        for line in self._lines:
            if line.failure is not None and line.name not in self._told:
                self._told.add(line.name)
                self._post(LogMessage(f"track.{line.name} is left, the run goes on: {line.failure}", warning=True))


@contextmanager
def tracking(recipe: Recipe | MutualRecipe, folder: Path, post: Listener) -> Iterator[Tracking]:
    """The trackers that a recipe names, for as long as its run lasts.

    Args:
        recipe: Of the run.
        folder: The run's, where trackers note how to go on with their own.
        post: Hears, once, of a tracker that is left.
    """
    run = Tracked(folder, _flat(recipe.model_dump(mode="json")), recipe_yaml(recipe))
    told = Tracking([Line(name, begin) for name, begin in _begins(recipe.loggers, run)], post)
    try:
        yield told
    finally:
        told.close()


def _begins(section: LoggersSection, run: Tracked) -> Iterator[tuple[str, Callable[[], Tracker]]]:
    """Name and beginning of each tracker; its package is imported when it begins, in its own thread."""
    if section.tensorboard:
        yield "tensorboard", lambda: _tensorboard(run)
    if (mlflow := section.mlflow) is not None:
        yield "mlflow", lambda: _mlflow(mlflow, run)
    if (wandb := section.wandb) is not None:
        yield "wandb", lambda: _wandb(wandb, run)


def _tensorboard(run: Tracked) -> Tracker:
    from distcse.tracking.tensorboard import TensorBoard

    return TensorBoard(run)


def _mlflow(section: MLflowSection, run: Tracked) -> Tracker:
    from distcse.tracking.mlflow import MLflow

    return MLflow(section, run)


def _wandb(section: WandbSection, run: Tracked) -> Tracker:
    from distcse.tracking.wandb import Wandb

    return Wandb(section, run)


def _figures(event: StepReport) -> dict[str, float]:
    found = {f"train/{part}": value for part, value in event.losses.items()}
    found["train/lr"] = event.lr
    if event.seconds:
        found["train/steps_per_second"] = 1 / event.seconds
        found["train/teacher_wait_share"] = event.waited / event.seconds
    return found


def _flat(knobs: Any, path: str = "") -> dict[str, Any]:
    """Knobs of a nested recipe by path."""
    if not isinstance(knobs, dict | list) or not knobs:
        return {path: knobs}
    inside = knobs.items() if isinstance(knobs, dict) else enumerate(knobs)
    found: dict[str, Any] = {}
    for name, value in inside:
        found |= _flat(value, f"{path}.{name}" if path else str(name))
    return found
