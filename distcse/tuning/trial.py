"""One trial: the recipe with one set of values, trained by the same code as any run, its dev scores reported as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distcse.errors import DivergedError
from distcse.events import CheckpointSaved, DevScore, Event, GroupActivity, GroupEvent, Reporter
from distcse.experiments.distillation.backends import Backend
from distcse.recipe import MutualRecipe, Recipe, with_values
from distcse.runs.directory import RunDirectory
from distcse.storage import remove
from distcse.trainer.checkpoints import CheckpointStore, load_trainer_state
from distcse.tuning.records import Trial, TrialMetric, read_trial, readable_trials

Report = Callable[[dict[str, Any]], None]

WORST = -100.0
"""What a trial that diverged reports: no dev score is lower."""


@dataclass(frozen=True)
class TrialContext:
    """What all trials of a sweep share."""

    recipe: Recipe | MutualRecipe
    """What a trial runs but for its values; nothing is measured at its end."""
    trials: Path
    """Folder of the trials' folders."""
    backend: Backend | None = None
    """Where training happens; None lets the recipe say."""
    keep_models: bool = False
    """Keep each trial's model; its checkpoints are removed in any case."""
    exchanges: bool = False
    """Trials go on from each other's checkpoints: a dev score is reported when its checkpoint is whole, and with it."""


def run_trial(
    context: TrialContext, name: str, values: Mapping[str, Any], report: Report, donor: Path | None = None
) -> Trial:
    """Train with some values, or go on with a trial that was begun.

    Args:
        desk: What all trials share.
        name: The trial's name, also that of its folder.
        values: By recipe path.
        report: Told every dev score, as `metrics_of` puts it, and its `checkpoint` where trials exchange them. It may end the
            trial by raising.
        donor: A checkpoint to go on from, of this trial or of another.

    Returns:
        The trial as it ended. One that ended before, or whose values another finished trial had, is not trained again: what was
        recorded is reported.
    """
    folder = context.trials / name
    folder.mkdir(parents=True, exist_ok=True)
    trial = read_trial(folder)
    if trial is not None and trial.ended:
        return _told(trial, report)
    if trial is None:
        trial = Trial(name, dict(values), begun=time.time())
        if not context.exchanges and (same := _finished_alike(context.trials, values)) is not None:
            trial = replace(same, name=name, begun=trial.begun, recalled_from=same.name)
            trial.write(folder)
            return _told(trial, report)
    else:
        trial = replace(trial, values=dict(values), starts=trial.starts + 1)
    worked = trial.seconds
    if donor is not None:
        CheckpointStore(folder).adopt(donor)
        trial = replace(trial, reported=_of_lineage(trial, donor))
    trial.write(folder)

    recipe = with_values(context.recipe, values)
    notebook = _TrialReporter(folder, trial, worked, recipe, report, context.exchanges)
    try:
        _train(recipe, RunDirectory.begin(folder, recipe), Reporter(notebook.on_event), context.backend)
    except DivergedError as mistake:
        trial = replace(notebook.trial, status="diverged", why=mistake.coded_message)
    else:
        trial = replace(notebook.trial, status="finished")
    trial.write(folder)
    clear(folder, keep_model=context.keep_models)
    if trial.status == "diverged":
        report({**metrics_of(trial), "dev": WORST, "best": WORST})
    return trial


def metrics_of(trial: Trial) -> dict[str, Any]:
    """The trial's last dev score and its best one, as flat numbers."""
    last, best = trial.reported[-1] if trial.reported else None, trial.best
    return {
        "dev": last.score if last else WORST,
        "best": best.score if best else WORST,
        "step": last.step if last else 0,
        "progress": int(last.progress) if last else 0,
        "seconds": last.seconds if last else 0.0,
    }


def clear(folder: Path, keep_model: bool = False) -> None:
    """Remove what a trial that ended leaves behind and nobody reads."""
    for inside in ["checkpoints", "ray", "groups", *([] if keep_model else ["model", "models"])]:
        remove(folder / inside)


def _told(trial: Trial, report: Report) -> Trial:
    """The recorded scores, as if they came now."""
    for number in range(len(trial.reported)):
        report(metrics_of(replace(trial, reported=trial.reported[: number + 1])))
    if trial.status == "diverged":
        report({**metrics_of(trial), "dev": WORST, "best": WORST})
    return trial


def _of_lineage(trial: Trial, donor: Path) -> list[TrialMetric]:
    """A trial's scores that a checkpoint has too: those of weights that were given up for another's say nothing of it now."""
    scored = {(step, score) for step, score in load_trainer_state(donor).scores}
    return [entry for entry in trial.reported if (entry.step, entry.score) in scored]


def _finished_alike(trials: Path, values: Mapping[str, Any]) -> Trial | None:
    """A finished trial of the same values."""
    alike = (
        t for t in readable_trials(trials) if t.values == values and t.status == "finished" and not t.recalled_from
    )
    return next(alike, None)


def _train(recipe: Recipe | MutualRecipe, directory: RunDirectory, reporter: Reporter, backend: Backend | None) -> None:
    if isinstance(recipe, MutualRecipe):
        from distcse.experiments.mutual import run_mutual

        run_mutual(recipe, reporter, directory)
    else:
        from distcse.experiments.distillation.run import run

        run(recipe, reporter, directory, backend)


class _TrialReporter:
    """Hears a run's events; notes and reports its dev scores."""

    def __init__(
        self,
        folder: Path,
        trial: Trial,
        worked: float,
        recipe: Recipe | MutualRecipe,
        report: Report,
        with_checkpoints: bool,
    ) -> None:
        self.trial = trial
        self._folder = folder
        self._report = report
        self._with_checkpoints = with_checkpoints
        self._before = worked
        self._began = time.monotonic()
        self._groups = _Groups(recipe, folder) if isinstance(recipe, MutualRecipe) else None

    def on_event(self, event: Event) -> None:
        if isinstance(event, DevScore):
            self._score(event.step, 100 * event.step / event.total, event.score)
        elif isinstance(event, CheckpointSaved) and self._with_checkpoints:
            if self.trial.reported and self.trial.reported[-1].step == event.step:
                self._report({**metrics_of(self.trial), "checkpoint": event.folder})
        elif self._groups and isinstance(event, GroupEvent) and isinstance(event.event, GroupActivity):
            for scored in self._groups.ended():
                self._score(*scored)

    def _score(self, step: int, progress: float, score: float) -> None:
        seconds = self._before + time.monotonic() - self._began
        self.trial = self.trial.with_score(TrialMetric(step, progress, score, seconds))
        self.trial.write(self._folder)
        if not self._with_checkpoints:
            self._report(metrics_of(self.trial))


class _Groups:
    """A mutual distillation scores once a cycle: the mean, over its groups, of each one's best bi-encoder so far."""

    def __init__(self, recipe: MutualRecipe, run: Path) -> None:
        self._cycles = recipe.mutual.cycles
        self._groups = [group.name for group in recipe.groups]
        self._run = run
        self._scored = 0

    def ended(self) -> Iterator[tuple[int, float, float]]:
        """(cycle, percent of all cycles, score) of each cycle that has ended since this was asked last."""
        from distcse.experiments.mutual.phase_store import PhaseStore
        from distcse.experiments.mutual.phases import Phase

        ledger = PhaseStore(self._run)
        names = [name for name in self._groups if name not in ledger.dropped]
        while self._scored < self._cycles and names:
            phases = [ledger.posted(Phase(2 * cycle)) for cycle in range(1, self._scored + 2)]
            if not all(name in phases[-1] for name in names):
                return
            self._scored += 1
            bests = [max(phase[name]["dev"] for phase in phases if name in phase) for name in names]
            yield self._scored, 100 * self._scored / self._cycles, sum(bests) / len(bests)
