"""Distillation: a student learns from frozen teachers' lists and vectors, or from the text alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distcse.device import DeviceSpeed
from distcse.errors import CheckpointError
from distcse.events import Reporter
from distcse.experiments.backend import Backend
from distcse.experiments.distillation.final_evaluation import final_scores, labelled_tasks
from distcse.experiments.distillation.fingerprints import data_fingerprints, read_fingerprints
from distcse.experiments.distillation.joining import joined_for_run
from distcse.experiments.distillation.model import encoder_weights
from distcse.experiments.distillation.preflight import check_recipe, check_run
from distcse.experiments.distillation.preparation import PreparedCorpus
from distcse.experiments.distillation.result import DistillationResult
from distcse.experiments.distillation.roles import roles_on, with_precisions
from distcse.experiments.distillation.trials import DistillationTrials
from distcse.experiments.distillation.weight_interpolation import WeightInterpolation
from distcse.experiments.experiment import Experiment, register_experiment
from distcse.experiments.run_scope import open_run
from distcse.models import Encoder
from distcse.placement.resources import Node
from distcse.precision import Role
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory
from distcse.storage import to_uri
from distcse.tracking import track_run
from distcse.trainer.checkpoints import CheckpointStore, load_model_state


@register_experiment(Recipe)
class Distillation(Experiment[Recipe]):
    """Training of one student (see `Experiment`)."""

    name = "distillation"

    def check(
        self,
        backend: Backend,
        reporter: Reporter,
        warnings_of_trials: Callable[[Sequence[Node]], list[str]] | None = None,
    ) -> None:
        check_run(self.recipe, backend, reporter, warnings_of_trials)

    def fingerprints(self) -> dict[str, str]:
        return read_fingerprints(self.recipe)

    def run(self, backend: Backend, reporter: Reporter, directory: RunDirectory | None = None) -> DistillationResult:
        check_recipe(self.recipe)
        labelled = labelled_tasks(self.recipe)
        with open_run(self.recipe, backend, reporter, directory) as (directory, lease, reporter):
            if lease.has_local_changes:
                CheckpointStore(directory.path).rescue(reporter.emit)
            recipe = self.recipe if backend.is_for_trials else with_precisions(self.recipe, backend.cluster, reporter)
            prepared = PreparedCorpus.prepare(recipe, reporter)
            recipe, corpus = prepared.recipe, prepared.corpus
            if recipe != self.recipe:
                directory.decide(recipe)
            directory.record(recipe.seed, data_fingerprints(recipe, corpus, labelled))
            with track_run(recipe, directory.path, reporter.emit) as tracked:
                reporter = tracked.relay(reporter)
                with joined_for_run(recipe, backend.cluster, directory.path, reporter):
                    reporter = backend.metered(reporter, directory.path.name)
                    tables = prepared.tables(backend, reporter)
                    spec = prepared.spec(directory.path, tables, reporter, lease)
                    train_result = backend.train(spec, corpus, tables, reporter)
                student, evaluation = _export(recipe, directory), None
                if not train_result.interrupted:
                    initial, emit = prepared.initial_encoder, reporter.emit
                    evaluation = final_scores(recipe, corpus, labelled, initial, student, directory.model, emit)
                tracked.end(train_result.interrupted, evaluation)
            if evaluation is not None:
                evaluation.write(directory.evaluation)
            directory.store_events()
            return DistillationResult(recipe, directory, train_result, evaluation, len(corpus))

    def precision_roles(self, devices: Sequence[DeviceSpeed]) -> list[Role]:
        return roles_on(self.recipe, list(devices))

    @property
    def trials(self) -> DistillationTrials:
        return DistillationTrials(self.recipe)


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
