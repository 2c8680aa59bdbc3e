"""The trials of a sweep over a student's recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from distcse.errors import SearchSpaceError
from distcse.evaluation import Contamination, Tasks
from distcse.events import DevScore, Event, Reporter
from distcse.experiments.backend import Backend
from distcse.experiments.distillation.corpus import read_corpus
from distcse.experiments.distillation.dev_metric import read_labelled_dev
from distcse.experiments.distillation.extent import Extent, fit_to_corpus
from distcse.experiments.distillation.final_evaluation import contamination_of, labelled_tasks
from distcse.experiments.distillation.fingerprints import data_fingerprints
from distcse.experiments.distillation.joining import read_by_workers
from distcse.experiments.distillation.preparation import PreparedCorpus, require_shared_projection
from distcse.experiments.distillation.roles import with_precisions
from distcse.experiments.distillation.warnings import band_warnings, teacher_token_warnings
from distcse.experiments.trials import SharedPaths, SharedTables, TrialGpus, TrialRequest, Trials, TrialScore
from distcse.placement.cluster import Cluster
from distcse.preflight.warnings import report_warnings
from distcse.recipe import LoggersSection, Recipe, Sweep, TrainedSection, decided
from distcse.runs.directory import RunDirectory
from distcse.storage import resolve_path


class DistillationTrials(Trials):
    """Trials that each train a student; all share the corpus and the teachers (see `Trials`).

    Args:
        recipe: The sweep's recipe.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._contamination: Contamination | None = None

    @property
    def request(self) -> TrialRequest:
        training = self._recipe.training
        return TrialRequest(
            training.workers,
            training.cpus_per_worker,
            training.gpus_per_worker,
            training.node_labels,
            self._recipe.teachers,
        )

    @property
    def paths(self) -> SharedPaths:
        cache_folder = resolve_path(self._recipe.storage.cache)
        return SharedPaths(read_by_workers(self._recipe), {"storage.cache": cache_folder})

    @property
    def evaluation_precision(self) -> str:
        return decided(self._recipe.evaluation.precision)

    def recipe(self, cpus: float, gpus: float) -> Recipe:
        evaluation = self._recipe.evaluation.model_copy(update={"final_suites": [], "async_eval": None})
        training = self._recipe.training.model_copy(update={"cpus_per_worker": cpus, "gpus_per_worker": gpus})
        return self._recipe.model_copy(
            update={"evaluation": evaluation, "loggers": LoggersSection(), "training": training}
        )

    def with_precisions(self, cluster: Cluster, reporter: Reporter, gpus: TrialGpus) -> Recipe:
        return with_precisions(self._recipe, cluster, reporter, gpus)

    def check_search(self, sweep: Sweep, paths: Iterable[str]) -> None:
        if sweep.schedule.kind == "pbt" and self._recipe.training.workers > 1:
            raise SearchSpaceError(
                "schedule.kind is pbt, which copies checkpoints between trials with one worker; write training.workers: 1"
            )
        weights = next((path for path in paths if path.endswith(".alpha")), None)
        if weights and self._recipe.objective.projection_of is not None:
            raise SearchSpaceError(
                f"parameters.{weights} cannot be searched with objective.regression.projection, which was fitted to "
                "other weights; write objective.regression.projection: null, or remove the weights from the space"
            )
        if self._recipe.dev_score == "agreement" and weights:
            raise SearchSpaceError(
                f"parameters.{weights} cannot be searched with evaluation.dev=agreement, which depends on the weights; "
                "set evaluation.data, or remove the weights from the space"
            )

    def check_labels(self) -> None:
        read_labelled_dev(self._recipe)
        labelled_tasks(self._recipe)

    def prepare(self, backend: Backend, reporter: Reporter, sweep: RunDirectory) -> SharedTables:
        prepared = PreparedCorpus.prepare(self._recipe, backend, reporter)
        # Fitted once, for all trials and for best.yaml.
        if (fitted := fit_to_corpus(self._recipe, prepared.corpus, Reporter())) != self._recipe:
            sweep.decide(fitted)
        sweep.record(self._recipe.seed, data_fingerprints(self._recipe, prepared.corpus, self.labelled_tasks()))
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
        return labelled_tasks(self._recipe)

    def models(self, run: Path) -> dict[str, tuple[Path, TrainedSection]]:
        return {"": (run / "model", self._recipe.student)}

    def contamination(self, run: Path, tasks: Tasks, reporter: Reporter) -> Contamination:
        if self._contamination is None:  # all runs train on the same corpus
            corpus = read_corpus(self._recipe, reporter)
            self._contamination = contamination_of(self._recipe, corpus, tasks, reporter)
        return self._contamination


def _dev_scores(event: Event) -> Iterator[TrialScore]:
    if isinstance(event, DevScore):
        yield TrialScore(event.step, 100 * event.step / event.total, event.score)
