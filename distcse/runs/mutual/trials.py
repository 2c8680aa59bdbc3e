"""The trials of a sweep over a recipe of mutual distillation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from distcse.checks import require
from distcse.devices.cluster import Cluster
from distcse.devices.gpu_plan import Process
from distcse.evaluation import Contamination, Tasks
from distcse.events import Event, GroupActivity, GroupEvent, Reporter
from distcse.recipe import KINDS, LoggersSection, MutualRecipe, TrainedSection
from distcse.runs.backend import Backend
from distcse.runs.cluster_fit import NodeNeeds
from distcse.runs.directory import RunDirectory, check_storage
from distcse.runs.experiment import Result
from distcse.runs.mutual.experiment import MutualDistillation
from distcse.runs.mutual.final_evaluation import checked_tasks, contamination_of, wanted_tasks
from distcse.runs.mutual.pairs import data_fingerprints, fit_to_pairs, read_fingerprints, temporary_pairs
from distcse.runs.mutual.phase_store import PhaseStore, best_phase, dev_scores
from distcse.runs.mutual.phases import Phase
from distcse.runs.mutual.preflight import recipe_questions
from distcse.runs.mutual.processes import group_needs, with_precisions
from distcse.runs.trials import TRIALS, TrialGpus, Trials, TrialScore
from distcse.text import Pairs


class MutualTrials(Trials):
    """Trials that each train all groups one after the other, in one process (see `Trials`)."""

    searched: MutualRecipe
    leaves_threads = True

    @property
    def processes(self) -> list[Process]:
        return [Process(TRIALS, 1, None, None, None, "a trial", "search.concurrent", {})]

    @property
    def needs(self) -> NodeNeeds:
        return group_needs(self.searched, self.searched.groups, in_sweep=True)

    def train(self, backend: Backend, reporter: Reporter, directory: RunDirectory) -> Result:
        return MutualDistillation(self.searched).run(backend, reporter, directory)

    def recipe(self, cpus: float, gpus: float) -> MutualRecipe:
        evaluation = self.searched.evaluation.model_copy(update={"final_suites": []})
        return self.searched.model_copy(update={"evaluation": evaluation, "loggers": LoggersSection(), "ray": False})

    def with_precisions(self, cluster: Cluster, reporter: Reporter, gpus: TrialGpus) -> MutualRecipe:
        return with_precisions(self.searched, cluster, reporter, gpus.worker)

    def check_labels(self) -> None:
        require(recipe_questions(self.recipe(0, 0)))  # as trials see it: without loggers
        check_storage(self.searched.storage)
        checked_tasks(self.searched)

    def prepare(self, backend: Backend, reporter: Reporter, sweep: RunDirectory) -> None:
        if self.searched.pairs.mine is None:  # fitted once, for all trials and for best.yaml
            with temporary_pairs(self.searched, reporter) as pairs:
                if (fitted := fit_to_pairs(self.searched, len(pairs), reporter)) != self.searched:
                    sweep.decide(fitted)
                fingerprints = data_fingerprints(self.searched, self.searched.groups, pairs, self.labelled_tasks())
        else:
            fingerprints = read_fingerprints(self.searched, reporter)
        sweep.record(self.searched.seed, fingerprints)

    def scores(self, run: Path) -> Callable[[Event], Iterable[TrialScore]]:
        return CycleScores(self.searched, run).of

    def labelled_tasks(self) -> Tasks:
        return wanted_tasks(self.searched)

    def models(self, run: Path) -> dict[str, tuple[Path, TrainedSection]]:
        return {
            f"{group.name} {kind}": (run / "models" / group.name / kind, group)
            for group in self.searched.groups
            for kind in KINDS
        }

    def contamination(self, run: Path, tasks: Tasks, reporter: Reporter) -> Contamination:
        return contamination_of(self.searched, Pairs.open(run / "pairs"), tasks, reporter)


class CycleScores:
    """Dev scores of a trial, one per cycle: the mean over groups of each group's best bi-encoder so far."""

    def __init__(self, recipe: MutualRecipe, run: Path) -> None:
        self._recipe = recipe
        self._groups = [group.name for group in recipe.groups]
        self._run = run
        self._scored = 0

    def of(self, event: Event) -> Iterator[TrialScore]:
        """Yield the score of each cycle that has ended since the last call, if the event reports a group's activity."""
        if not isinstance(event, GroupEvent) or not isinstance(event.event, GroupActivity):
            return
        store = PhaseStore(self._run)
        names = [name for name in self._groups if name not in store.dropped]
        cycles = self._recipe.mutual.cycles
        while self._scored < cycles and names:
            phase = Phase(2 * (self._scored + 1))
            if not all(name in store.posted(phase) for name in names):
                return
            self._scored += 1
            scores = [dev_scores(self._recipe, store, name, "bi", phase) for name in names]
            mean = sum(each[best_phase(each)] or 0.0 for each in scores) / len(scores)
            yield TrialScore(self._scored, 100 * self._scored / cycles, mean)
