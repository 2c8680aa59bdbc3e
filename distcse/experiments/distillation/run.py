"""One run, from a recipe to a saved student: the stages in their order."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from distcse.errors import CheckpointError
from distcse.evaluation import Evaluation, Tasks
from distcse.events import LogMessage, Reporter, one_by_one
from distcse.experiments.distillation.backends import Backend, make_backend
from distcse.experiments.distillation.final_evaluation import final_scores, labelled_tasks
from distcse.experiments.distillation.fingerprints import data_of
from distcse.experiments.distillation.model import encoder_weights
from distcse.experiments.distillation.preflight import check_recipe
from distcse.experiments.distillation.preparation import PreparedCorpus
from distcse.experiments.distillation.roles import with_precisions
from distcse.experiments.distillation.weight_interpolation import WeightInterpolation
from distcse.models import Encoder
from distcse.ray_backend.cluster import coming_up
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease
from distcse.storage import to_uri
from distcse.tracking import tracking
from distcse.trainer.checkpoints import CheckpointStore, load_model_state
from distcse.trainer.trainer import TrainResult


@dataclass(frozen=True)
class Result:
    """What a run leaves behind."""

    recipe: Recipe
    directory: RunDirectory
    outcome: TrainResult
    evaluation: Evaluation | None
    """Start, student and teachers; None when the run was interrupted or nothing was to be measured."""
    rows: int
    """Sentences in the corpus."""


def run(
    recipe: Recipe, reporter: Reporter, directory: RunDirectory | None = None, backend: Backend | None = None
) -> Result:
    """Carry out a recipe, or go on with an interrupted run.

    Args:
        recipe: What to do.
        reporter: Receives events; its stop request ends the run, with a checkpoint, at the next report.
        directory: The run's folder, empty or of a run that was begun; None makes a new one.
        house: Where the work is done; None lets `training.workers` say.

    Raises a `DistcseError` that names what to mend; whatever was finished before it (corpus, tables, checkpoints) stays.
    """
    check_recipe(recipe)
    labelled = labelled_tasks(recipe)
    directory = directory or RunDirectory.create(recipe)
    with directory.leased(reporter) as lease:
        reporter = Reporter(one_by_one(directory.log, reporter.emit), reporter.stop_requested)
        reporter.emit(LogMessage(f"run directory {to_uri(directory.path)}"))
        with coming_up(backend is None and recipe.training.workers > 0):
            return _run(recipe, reporter, directory, lease, labelled, backend)


def _run(
    recipe: Recipe, reporter: Reporter, directory: RunDirectory, lease: Lease, labelled: Tasks, backend: Backend | None
) -> Result:
    if lease.left_here:
        CheckpointStore(directory.path).rescue(reporter.emit)
    asked = recipe
    if backend is None:  # trials of a sweep have their precisions from it
        recipe = with_precisions(recipe, reporter)
    text = PreparedCorpus.prepare(recipe, reporter)
    recipe = text.recipe
    if recipe != asked:
        directory.decide(recipe)
    directory.record(recipe.seed, data_of(recipe, text.corpus, labelled))
    backend, surroundings = (backend, nullcontext()) if backend else make_backend(recipe, directory.path, reporter)
    with tracking(recipe, directory.path, reporter.emit) as tracked:
        reporter = tracked.relay(reporter)
        with surroundings:
            reporter = backend.metered(reporter, directory.path.name)
            tables = text.tables(backend, reporter)
            spec = text.spec(directory.path, tables, reporter, lease)
            outcome = backend.train(spec, text.corpus, tables, reporter)
        student = _export(recipe, directory)
        evaluation = None
        if not outcome.interrupted:
            evaluation = final_scores(
                recipe, text.corpus, labelled, text.start, student, directory.model, reporter.emit
            )
        tracked.end(outcome.interrupted, evaluation)
    if evaluation is not None:
        evaluation.write(directory.evaluation)
    directory.store_events()
    return Result(recipe, directory, outcome, evaluation, len(text.corpus))


def _export(recipe: Recipe, directory: RunDirectory) -> Encoder:
    """The encoder of the best checkpoint (of the latest, where nothing was scored), with its share of the start.

    What trained it stays behind.
    """
    checkpoints = CheckpointStore(directory.path)
    folder = checkpoints.best() or checkpoints.latest()
    if folder is None:
        raise CheckpointError(
            f"{to_uri(directory.path)} has no checkpoint; run again with --resume {to_uri(directory.path)}"
        )
    encoder = Encoder.from_section(recipe.student)
    start = WeightInterpolation(encoder, recipe.student.init_weight_mix)
    encoder.load_state_dict(start.mixed(encoder_weights(load_model_state(folder).weights)))
    encoder.eval().save(directory.model)
    return encoder
