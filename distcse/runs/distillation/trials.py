"""The trials of a sweep over a student's recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from distcse.devices.cluster import Cluster
from distcse.devices.gpu_plan import Process
from distcse.errors import SearchSpaceError
from distcse.evaluation import Contamination, Tasks
from distcse.events import DevScore, Event, Reporter
from distcse.preflight.warnings import report_warnings
from distcse.recipe import LoggersSection, Recipe, Sweep, TeachersSection, TrainedSection
from distcse.runs.backend import Backend
from distcse.runs.cluster_fit import NodeNeeds
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.dev_metric import read_labelled_dev
from distcse.runs.distillation.experiment import Distillation
from distcse.runs.distillation.extent import Extent, fit_to_corpus
from distcse.runs.distillation.final_evaluation import contamination_of, labelled_tasks
from distcse.runs.distillation.preparation import PreparedCorpus, data_fingerprints, require_shared_projection
from distcse.runs.distillation.processes import student_needs, student_processes, with_precisions
from distcse.runs.distillation.warnings import band_warnings, teacher_token_warnings
from distcse.runs.experiment import Result
from distcse.runs.trials import TRIALS, SharedTables, TrialGpus, Trials, TrialScore
from distcse.teachers.resources import server_processes


class DistillationTrials(Trials):
    """Trials that each train a student; all share the corpus and the teachers (see `Trials`)."""

    searched: Recipe

    def __init__(self, searched: Recipe) -> None:
        super().__init__(searched)
        self._contamination: Contamination | None = None

    @property
    def processes(self) -> list[Process]:
        workers, key = self.searched.training.workers, "training.workers"
        description = f"a trial with {key}={workers}"
        trial = replace(
            student_processes(self.searched)[0],
            name=TRIALS,
            number=max(1, workers),
            description=description,
            number_key=key,
            is_elastic=False,
        )
        return [trial, *server_processes(self.searched.teachers, reads_tables=workers <= 1)]

    @property
    def needs(self) -> NodeNeeds:
        return student_needs(self.searched)

    @property
    def teachers(self) -> TeachersSection:
        return self.searched.teachers

    def train(self, backend: Backend, reporter: Reporter, directory: RunDirectory) -> Result:
        return Distillation(self.searched).run(backend, reporter, directory, is_trial=True)

    def recipe(self, cpus: float, gpus: float) -> Recipe:
        evaluation = self.searched.evaluation.model_copy(update={"final_suites": []})
        training = self.searched.training.model_copy(update={"cpus_per_worker": cpus, "gpus_per_worker": gpus})
        return self.searched.model_copy(
            update={"evaluation": evaluation, "loggers": LoggersSection(), "training": training}
        )

    def with_precisions(self, cluster: Cluster, reporter: Reporter, gpus: TrialGpus) -> Recipe:
        return with_precisions(self.searched, cluster, reporter, gpus)

    def check_search(self, sweep: Sweep, paths: Iterable[str]) -> None:
        if sweep.schedule.kind == "pbt" and self.searched.training.workers > 1:
            raise SearchSpaceError(
                "schedule.kind is pbt, which copies checkpoints between trials with one worker; write training.workers: 1"
            )
        weights = next((path for path in paths if path.endswith(".alpha")), None)
        if weights and self.searched.objective.projection_of is not None:
            raise SearchSpaceError(
                f"parameters.{weights} cannot be searched with objective.regression.projection, which was fitted to "
                "other weights; write objective.regression.projection: null, or remove the weights from the space"
            )
        if self.searched.dev_score == "agreement" and weights:
            raise SearchSpaceError(
                f"parameters.{weights} cannot be searched with evaluation.dev=agreement, which depends on the weights; "
                "set evaluation.data, or remove the weights from the space"
            )

    def check_labels(self) -> None:
        read_labelled_dev(self.searched)
        labelled_tasks(self.searched)

    def prepare(self, backend: Backend, reporter: Reporter, sweep: RunDirectory) -> SharedTables:
        prepared = PreparedCorpus.prepare(self.searched, backend, reporter)
        # Fitted once, for all trials and for best.yaml.
        if (fitted := fit_to_corpus(self.searched, prepared.corpus, Reporter())) != self.searched:
            sweep.decide(fitted)
        sweep.record(self.searched.seed, data_fingerprints(self.searched, prepared.corpus, self.labelled_tasks()))
        require_shared_projection(prepared.recipe, prepared.corpus)  # once, and before the teachers embed
        prepared.check_student(backend, reporter)  # fail once, not in every trial, if the student cannot be loaded
        tables = prepared.tables(backend, reporter)
        recipe, corpus = prepared.recipe, prepared.corpus
        of_text = [*Extent.of(recipe, corpus).warnings, *teacher_token_warnings(recipe, corpus)]
        report_warnings([*of_text, *band_warnings(recipe, corpus, keep=True)], reporter)
        return SharedTables(prepared.corpus, tables)

    def scores(self, run: Path) -> Callable[[Event], Iterable[TrialScore]]:
        return _dev_scores

    def labelled_tasks(self) -> Tasks:
        return labelled_tasks(self.searched)

    def models(self, run: Path) -> dict[str, tuple[Path, TrainedSection]]:
        return {"": (run / "model", self.searched.student)}

    def contamination(self, run: Path, tasks: Tasks, reporter: Reporter) -> Contamination:
        if self._contamination is None:  # all runs train on the same corpus
            corpus = read_corpus(self.searched, reporter)
            self._contamination = contamination_of(self.searched, corpus, tasks, reporter)
        return self._contamination


def _dev_scores(event: Event) -> Iterator[TrialScore]:
    if isinstance(event, DevScore):
        yield TrialScore(event.step, 100 * event.step / event.total, event.score)
