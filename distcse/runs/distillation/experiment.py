"""Distillation: a student learns from frozen teachers' lists and vectors, or from the text alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from distcse.checks import Question, require
from distcse.devices.cluster import Cluster
from distcse.devices.device import DeviceSpeed
from distcse.devices.gpu_plan import PlansOfTrials, Process
from distcse.devices.resources import Node
from distcse.errors import CheckpointError, SearchSpaceError, StoppedEarlyError
from distcse.evaluation import Contamination, Tasks, read_dev
from distcse.events import DevScore, Event, Reporter
from distcse.models import Encoder, EncoderHandle
from distcse.models.student import WeightInterpolation
from distcse.preflight.precision import Role
from distcse.preflight.warnings import SettingsWarning, report_warnings, warn_of_curve
from distcse.recipe import LoggersSection, Recipe, Sweep, TeachersSection, TrainedSection
from distcse.runs.backend import Backend, DeviceCall
from distcse.runs.cluster_fit import NodeNeeds, joined_for_devices, model_memory, report_gpus, waited_for_nodes
from distcse.runs.directory import RunDirectory, check_storage
from distcse.runs.distillation.corpus import band_warnings, extent_of, fit_to_corpus, model_warnings, read_corpus
from distcse.runs.distillation.distillation_task import TrainSpec
from distcse.runs.distillation.final_evaluation import ScoredStudent, contamination_of, final_scores, labelled_tasks
from distcse.runs.distillation.precompute import prepare_candidates
from distcse.runs.distillation.preflight import recipe_questions, rehearse_run
from distcse.runs.distillation.preparation import (
    PreparedCorpus,
    data_fingerprints,
    read_fingerprints,
    require_shared_projection,
)
from distcse.runs.distillation.processes import (
    joined_for_run,
    least_requests,
    list_teachers,
    plan_run,
    plans_of_run,
    roles_on,
    student_needs,
    student_processes,
    with_list_teachers,
    with_precisions,
)
from distcse.runs.distillation.student_model import encoder_weights, initial_student
from distcse.runs.experiment import (
    TRIALS,
    Experiment,
    SharedTables,
    TrialGpus,
    Trials,
    TrialScore,
    open_run,
    register_experiment,
)
from distcse.runs.final_evaluation import FinalScores
from distcse.runs.result import Result, StudentResult
from distcse.storage import ArtifactStore
from distcse.teachers.kinds import kind_of
from distcse.teachers.resources import server_processes
from distcse.teachers.table import EmbeddingTable
from distcse.text import Corpus
from distcse.tracking import Tracking, track_run
from distcse.training.checkpoint_files import load_weights
from distcse.training.checkpoints import CheckpointStore
from distcse.training.trainer import TrainResult


@register_experiment(Recipe)
class Distillation(Experiment[Recipe]):
    """Training of one student (see `Experiment`)."""

    name = "distillation"

    def rehearse(self, backend: Backend, reporter: Reporter, plans_of_trials: PlansOfTrials | None = None) -> None:
        rehearse_run(self.recipe, backend, reporter, plans_of_trials)

    def questions(self, begun: RunDirectory | None = None) -> list[Question]:
        return recipe_questions(self.recipe)

    def settings_warnings(self, only_local: bool = False) -> list[SettingsWarning]:
        return [*super().settings_warnings(), *model_warnings(self.recipe, only_local)]

    def check_resources(self, nodes: Sequence[Node]) -> None:
        plan_run(self.recipe, nodes)

    @property
    def needs(self) -> NodeNeeds:
        return student_needs(self.recipe)

    def fingerprints(self, reporter: Reporter) -> dict[str, str]:
        return read_fingerprints(self.recipe, reporter)

    def unread_keys(self) -> dict[str, str]:
        kinds = [kind_of(section, only_local=True) for section in self.recipe.teachers.encoders]
        of_kinds = {
            f"teachers.encoders.{number}.{key}": reason
            for number, kind in enumerate(kinds)
            for key, reason in kind.unread_keys.items()
        }
        return {**super().unread_keys(), **of_kinds}

    def run(
        self, backend: Backend, reporter: Reporter, directory: RunDirectory | None = None, is_trial: bool = False
    ) -> StudentResult:
        """Run the recipe; see `Experiment.run`.

        Args:
            backend: Where the work runs.
            reporter: Receives events.
            directory: The run's folder.
            is_trial: Whether a sweep runs the recipe, which has decided its precisions, hashed the teachers' tables, and
                reported what holds for all trials. Default: False.
        """
        with self.opened(backend, reporter, directory, is_trial) as run:
            return run.end(backend.train(run.spec, run.corpus, run.tables, run.reporter))

    @contextmanager
    def opened(
        self, backend: Backend, reporter: Reporter, directory: RunDirectory | None = None, is_trial: bool = False
    ) -> Iterator[OpenDistillation]:
        """Context manager: open a run, prepare all that the student is trained on, and close it at the end.

        Arguments and errors are those of `run`.
        """
        require(self.questions(directory))
        check_storage(self.recipe.storage)
        labelled = labelled_tasks(self.recipe)
        run = open_run(self, backend, reporter, directory, is_trial)
        with (
            run as (directory, lease, reporter),
            joined_for_devices(backend.cluster),
            waited_for_nodes(backend.cluster, self.recipe, least_requests(self.recipe), reporter),
        ):
            if lease.has_local_changes:
                CheckpointStore(directory.store).rescue(reporter.emit)
            recipe = self.recipe if is_trial else with_precisions(self.recipe, backend.cluster, reporter)
            report_gpus(backend.cluster, recipe.gpu_mode, partial(plans_of_run, recipe), reporter)
            prepared = PreparedCorpus.prepare(recipe, backend, reporter)
            recipe, corpus = prepared.recipe, prepared.corpus
            require_shared_projection(recipe, corpus, directory)
            if not is_trial:
                steps, warnings = extent_of(recipe, corpus)
                reporter.found("steps", steps)
                report_warnings(warnings, reporter)
            if recipe != self.recipe:
                directory.decide(recipe)
            directory.record(recipe.seed, data_fingerprints(recipe, corpus, labelled))
            with track_run(recipe, directory.store, reporter.emit) as tracked, ExitStack() as joined:
                reporter = tracked.relay(reporter)
                joined.enter_context(joined_for_run(recipe, backend.cluster, directory.path))
                reporter = joined.enter_context(backend.metered(reporter, directory.path.name))
                tables = prepared.tables(backend, reporter, verifies=not is_trial)
                if not is_trial:
                    report_warnings(band_warnings(recipe, corpus, keep=True), reporter)
                spec = prepared.spec(directory, tables, backend, reporter)
                lists = [tables[number] for number in list_teachers(recipe)]
                yield OpenDistillation(
                    prepared, lists, spec, directory, reporter, backend, labelled, tracked, joined, is_trial
                )
            directory.store_events()

    def precision_roles(self, devices: Sequence[DeviceSpeed]) -> list[Role]:
        return roles_on(self.recipe, list(devices))

    @property
    def trials(self) -> Trials:
        return DistillationTrials(self.recipe)


@dataclass(frozen=True)
class OpenDistillation:
    """An open run, whose student can be trained."""

    prepared: PreparedCorpus
    tables: Sequence[EmbeddingTable | None]
    """One per teacher of the spec; None for a live teacher."""
    spec: TrainSpec
    """The spec of the training workers."""
    directory: RunDirectory
    reporter: Reporter
    """Also logs events, counts metrics and feeds the trackers."""
    backend: Backend
    labelled: Tasks
    """The labeled sets of the final evaluation."""
    tracked: Tracking
    joined: ExitStack
    """Closed after the training, which needs the cluster longer than the final evaluation does."""
    is_trial: bool
    """Whether a sweep runs the recipe."""

    @property
    def corpus(self) -> Corpus:
        """The sentences."""
        return self.prepared.corpus

    def end(self, train_result: TrainResult) -> StudentResult:
        """Export and evaluate the trained student, also one whose training was interrupted.

        Returns:
            The run's result.
        """
        self.joined.close()
        if train_result.interrupted and not train_result.state.step:
            raise StoppedEarlyError("stopped before the first training step; what is stored is kept")
        recipe, directory, backend, reporter = self.prepared.recipe, self.directory, self.backend, self.reporter
        if not train_result.interrupted and not self.is_trial:
            report_warnings(warn_of_curve(train_result.state.scores, train_result.steps, recipe.training), reporter)
        start = self.prepared.initial_encoder  # perhaps loaded already
        if recipe.student.index_of is not None:
            start = EncoderHandle(partial(initial_student, recipe.student, directory.store))
        student = EncoderHandle(partial(load_trained, recipe, directory.store))
        final = FinalScores(None, stopped=train_result.interrupted)
        _export(recipe, student, directory, backend, reporter)
        if not train_result.interrupted:
            students = [
                ScoredStudent("start", recipe.student.backbone, start),
                ScoredStudent("student", str(directory.model), student, trained=directory.model),
            ]
            final = final_scores(recipe, self.corpus, self.labelled, students, directory, backend, reporter)
        self.tracked.end(final.stopped, final.evaluation)
        final.write(directory.store)
        if not train_result.interrupted:
            CheckpointStore(self.spec.run).keep_weights(reporter.emit)
        return StudentResult.of(recipe, directory, train_result, final.evaluation, len(self.corpus), final.stopped)


def _export(
    recipe: Recipe, student: EncoderHandle, directory: RunDirectory, backend: Backend, reporter: Reporter
) -> None:
    """Save the trained student in the run's folder, with its initial model's contamination, also after a stop request."""
    model = directory.store / directory.model.name
    call = DeviceCall(
        "export of the student",
        partial(_save, student, model),
        model_memory(recipe.student.backbone),
    )
    options = student_needs(recipe).options(directory.path, uses_gpu=False)
    backend.run_on_devices([call], options, Reporter(reporter.emit))
    model.fetch_folder()
    Contamination.of_model(recipe.student.backbone).write(model)


def _save(student: EncoderHandle, model: ArtifactStore, reporter: Reporter) -> None:
    student.get().save(model)


def load_trained(recipe: Recipe, run: ArtifactStore) -> Encoder:
    """Load the encoder of the best checkpoint (the latest without dev scores), interpolated with its initial weights.

    Projection and discriminator are left out.
    """
    checkpoints = CheckpointStore(run)
    folder = checkpoints.best() or checkpoints.latest()
    if folder is None:
        raise CheckpointError(f"{run} has no checkpoint; run again with --resume {run}")
    encoder = initial_student(recipe.student, run)
    interpolation = WeightInterpolation(encoder, recipe.student.init_weight_mix)
    encoder.load_state_dict(interpolation.interpolate(encoder_weights(load_weights(folder))))
    return encoder.eval()


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
        return [trial, *server_processes(self.teachers, reads_tables=workers <= 1)]

    @property
    def needs(self) -> NodeNeeds:
        return student_needs(self.searched)

    @property
    def teachers(self) -> TeachersSection:
        return with_list_teachers(self.searched).teachers

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
        read_dev(self.searched)
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
        _, warnings = extent_of(recipe, corpus)
        report_warnings([*warnings, *band_warnings(recipe, corpus, keep=True)], reporter)
        prepare_candidates(recipe, corpus, tables, backend, reporter)  # once, on all devices
        return SharedTables(prepared.corpus, [tables[number] for number in list_teachers(recipe)])

    def scores(self, run: ArtifactStore) -> Callable[[Event], Iterable[TrialScore]]:
        return _dev_scores

    def labelled_tasks(self) -> Tasks:
        return labelled_tasks(self.searched)

    def models(self, run: ArtifactStore) -> dict[str, tuple[ArtifactStore, TrainedSection]]:
        return {"": (run / "model", self.searched.student)}

    def contamination(self, run: ArtifactStore, tasks: Tasks, reporter: Reporter) -> Contamination:
        if self._contamination is None:  # all runs train on the same corpus
            corpus = read_corpus(self.searched, reporter)
            self._contamination = contamination_of(self.searched, corpus, tasks, reporter)
        return self._contamination


def _dev_scores(event: Event) -> Iterator[TrialScore]:
    if isinstance(event, DevScore):
        yield TrialScore(event.step, 100 * event.step / event.total, event.score)
