"""One distillation run, from a recipe to a saved and evaluated student."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from distcse.errors import CheckpointError
from distcse.evaluation import Evaluation, Tasks
from distcse.events import LogMessage, Reporter, combine_listeners
from distcse.experiments.distillation.backends import Backend, make_backend
from distcse.experiments.distillation.final_evaluation import final_scores, labelled_tasks
from distcse.experiments.distillation.fingerprints import data_fingerprints
from distcse.experiments.distillation.model import encoder_weights
from distcse.experiments.distillation.preflight import check_recipe
from distcse.experiments.distillation.preparation import PreparedCorpus
from distcse.experiments.distillation.roles import with_precisions
from distcse.experiments.distillation.weight_interpolation import WeightInterpolation
from distcse.models import Encoder
from distcse.ray_backend.cluster import starting_ray
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease
from distcse.storage import to_uri
from distcse.tracking import track_run
from distcse.trainer.checkpoints import CheckpointStore, load_model_state
from distcse.trainer.trainer import TrainResult


@dataclass(frozen=True)
class Result:
    """Result of a distillation run."""

    recipe: Recipe
    """The recipe, with the settings that it left to the run decided."""
    directory: RunDirectory
    train_result: TrainResult
    evaluation: Evaluation | None
    """Evaluation of initial student, student and teachers; None if the run was interrupted or selects no suite."""
    rows: int
    """Number of sentences in the corpus."""


def run(
    recipe: Recipe, reporter: Reporter, directory: RunDirectory | None = None, backend: Backend | None = None
) -> Result:
    """Run a recipe, or resume an interrupted run.

    Args:
        recipe: The recipe to run.
        reporter: Receives events. Its stop request ends the run, with a checkpoint, at the next report.
        directory: The run's folder, new or of an interrupted run; None creates one.
        backend: The backend, with its context already entered; None selects one by `training.workers`.

    Raises:
        DistcseError: The recipe, the data or the cluster has a problem. Finished work (corpus, tables, checkpoints) is kept.
    """
    check_recipe(recipe)
    labelled = labelled_tasks(recipe)
    directory = directory or RunDirectory.create(recipe)
    with directory.leased(reporter) as lease:
        reporter = Reporter(combine_listeners(directory.log, reporter.emit), reporter.stop_requested)
        reporter.emit(LogMessage(f"run directory {to_uri(directory.path)}"))
        with starting_ray(backend is None and recipe.training.workers > 0):
            return _run(recipe, reporter, directory, lease, labelled, backend)


def _run(
    recipe: Recipe, reporter: Reporter, directory: RunDirectory, lease: Lease, labelled: Tasks, backend: Backend | None
) -> Result:
    if lease.has_local_changes:
        CheckpointStore(directory.path).rescue(reporter.emit)
    requested = recipe
    if backend is None:  # a sweep has already decided the precisions of its trials
        recipe = with_precisions(recipe, reporter)
    prepared = PreparedCorpus.prepare(recipe, reporter)
    recipe = prepared.recipe
    if recipe != requested:
        directory.decide(recipe)
    directory.record(recipe.seed, data_fingerprints(recipe, prepared.corpus, labelled))
    backend, context = (backend, nullcontext()) if backend else make_backend(recipe, directory.path, reporter)
    with track_run(recipe, directory.path, reporter.emit) as tracked:
        reporter = tracked.relay(reporter)
        with context:
            reporter = backend.metered(reporter, directory.path.name)
            tables = prepared.tables(backend, reporter)
            spec = prepared.spec(directory.path, tables, reporter, lease)
            train_result = backend.train(spec, prepared.corpus, tables, reporter)
        student = _export(recipe, directory)
        evaluation = None
        if not train_result.interrupted:
            initial = prepared.initial_encoder
            evaluation = final_scores(
                recipe, prepared.corpus, labelled, initial, student, directory.model, reporter.emit
            )
        tracked.end(train_result.interrupted, evaluation)
    if evaluation is not None:
        evaluation.write(directory.evaluation)
    directory.store_events()
    return Result(recipe, directory, train_result, evaluation, len(prepared.corpus))


def _export(recipe: Recipe, directory: RunDirectory) -> Encoder:
    """Save the encoder of the best checkpoint (the latest without dev scores), interpolated with its initial weights.

    Projection, discriminator and queue are not saved.
    """
    checkpoints = CheckpointStore(directory.path)
    folder = checkpoints.best() or checkpoints.latest()
    if folder is None:
        raise CheckpointError(
            f"{to_uri(directory.path)} has no checkpoint; run again with --resume {to_uri(directory.path)}"
        )
    encoder = Encoder.from_section(recipe.student)
    interpolation = WeightInterpolation(encoder, recipe.student.init_weight_mix)
    encoder.load_state_dict(interpolation.interpolate(encoder_weights(load_model_state(folder).weights)))
    encoder.eval().save(directory.model)
    return encoder
