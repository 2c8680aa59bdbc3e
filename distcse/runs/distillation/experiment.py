"""Distillation: a student learns from frozen teachers' lists and vectors, or from the text alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from distcse.checks import Question, require
from distcse.devices.device import DeviceSpeed
from distcse.devices.gpu_plan import PlansOfTrials
from distcse.devices.resources import Node
from distcse.errors import CheckpointError, StoppedEarlyError
from distcse.evaluation import Contamination, Tasks
from distcse.events import Reporter
from distcse.models import Encoder, EncoderHandle
from distcse.models.student import WeightInterpolation
from distcse.preflight.precision import Role
from distcse.preflight.warnings import (
    SettingsWarning,
    report_warnings,
    warn_of_curve,
)
from distcse.recipe import Recipe
from distcse.runs.backend import Backend, DeviceCall
from distcse.runs.cluster_fit import joined_for_devices, model_memory, waited_for_nodes
from distcse.runs.directory import RunDirectory, check_storage
from distcse.runs.distillation.batch_loader import TrainSpec
from distcse.runs.distillation.extent import Extent
from distcse.runs.distillation.final_evaluation import ScoredStudent, final_scores, labelled_tasks
from distcse.runs.distillation.model import encoder_weights
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
    plan_run,
    report_gpus,
    roles_on,
    student_needs,
    with_precisions,
)
from distcse.runs.distillation.result import StudentResult
from distcse.runs.distillation.warnings import (
    band_warnings,
    cached_corpus_warnings,
    model_warnings,
    teacher_token_warnings,
)
from distcse.runs.experiment import Experiment, register_experiment
from distcse.runs.run_scope import open_run
from distcse.runs.stoppable_evaluation import FinalScores
from distcse.runs.trials import Trials
from distcse.storage import ArtifactStore
from distcse.teachers.kinds import kind_of
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

    def warnings(self, corpus_rows: int | None = None) -> list[SettingsWarning]:
        return [*super().warnings(), *cached_corpus_warnings(self.recipe, corpus_rows)]

    def check_resources(self, nodes: Sequence[Node]) -> None:
        plan_run(self.recipe, nodes)

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
                CheckpointStore(directory.path, lease).rescue(reporter.emit)
            recipe = self.recipe if is_trial else with_precisions(self.recipe, backend.cluster, reporter)
            report_gpus(recipe, backend.cluster, reporter)
            prepared = PreparedCorpus.prepare(recipe, backend, reporter)
            recipe, corpus = prepared.recipe, prepared.corpus
            require_shared_projection(recipe, corpus, directory.path)
            if not is_trial:
                extent = Extent.of(recipe, corpus)
                extent.report(reporter)
                report_warnings([*extent.warnings, *teacher_token_warnings(recipe, corpus)], reporter)
            if recipe != self.recipe:
                directory.decide(recipe)
            directory.record(recipe.seed, data_fingerprints(recipe, corpus, labelled))
            with track_run(recipe, directory.path, reporter.emit) as tracked, ExitStack() as joined:
                reporter = tracked.relay(reporter)
                joined.enter_context(joined_for_run(recipe, backend.cluster, directory.path))
                reporter = backend.metered(reporter, directory.path.name)
                tables = prepared.tables(backend, reporter, verifies=not is_trial)
                if not is_trial:
                    report_warnings(band_warnings(recipe, corpus, keep=True), reporter)
                spec = prepared.spec(directory.path, tables, backend, reporter, lease)
                yield OpenDistillation(
                    prepared, tables, spec, directory, reporter, backend, labelled, tracked, joined, is_trial
                )
            directory.store_events()

    def precision_roles(self, devices: Sequence[DeviceSpeed]) -> list[Role]:
        return roles_on(self.recipe, list(devices))

    @property
    def trials(self) -> Trials:
        from distcse.runs.distillation.trials import DistillationTrials

        return DistillationTrials(self.recipe)


@dataclass(frozen=True)
class OpenDistillation:
    """An open run, whose student can be trained."""

    prepared: PreparedCorpus
    tables: Sequence[EmbeddingTable | None]
    """One per teacher; None for a live teacher."""
    spec: TrainSpec
    """The spec of the training workers."""
    directory: RunDirectory
    reporter: Reporter
    """Also logs events, counts metrics and feeds the trackers."""
    backend: Backend
    labelled: Tasks
    """The labelled sets of the final evaluation."""
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

        Args:
            train_result: What the training returned.

        Returns:
            The run's result.

        Raises:
            StoppedEarlyError: A stop was requested before the first step, so that there is no model.
        """
        self.joined.close()
        if train_result.interrupted and not train_result.state.step:
            raise StoppedEarlyError("stopped before the first training step; what is stored is kept")
        recipe, directory, backend, reporter = self.prepared.recipe, self.directory, self.backend, self.reporter
        if not train_result.interrupted and not self.is_trial:
            report_warnings(warn_of_curve(train_result.state.scores, train_result.steps, recipe.training), reporter)
        student = EncoderHandle(partial(load_trained, recipe, directory.store))
        final = FinalScores(None, stopped=train_result.interrupted)
        _export(recipe, student, directory, backend, reporter)
        if not train_result.interrupted:
            students = [
                ScoredStudent("start", recipe.student.backbone, self.prepared.initial_encoder),
                ScoredStudent("student", str(directory.model), student, trained=directory.model),
            ]
            final = final_scores(recipe, self.corpus, self.labelled, students, directory, backend, reporter)
        self.tracked.end(final.stopped, final.evaluation)
        final.write(directory.store)
        if not train_result.interrupted:
            CheckpointStore(directory.path, self.spec.lease).keep_weights(reporter.emit)
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

    Projection, discriminator and queue are left out.
    """
    checkpoints = CheckpointStore(run.path)
    folder = checkpoints.best() or checkpoints.latest()
    if folder is None:
        raise CheckpointError(f"{run} has no checkpoint; run again with --resume {run}")
    encoder = Encoder.from_section(recipe.student)
    interpolation = WeightInterpolation(encoder, recipe.student.init_weight_mix)
    encoder.load_state_dict(interpolation.interpolate(encoder_weights(load_weights(folder))))
    return encoder.eval()
