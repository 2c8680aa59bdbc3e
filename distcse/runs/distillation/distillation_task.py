"""The training task of a student: two views of a batch of sentences, and the teachers' similarities between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cached_property

import torch
from torch import Tensor

from distcse.devices.distributed import on_all_ranks, rank, world_size
from distcse.events import Reporter
from distcse.losses import TeacherOutputs, build_objective, gather_views
from distcse.models.student import WeightInterpolation
from distcse.runs.distillation.batch_loader import BatchLoader, TrainSpec
from distcse.runs.distillation.dev_metric import DevMetric
from distcse.runs.distillation.model import StudentOutput, build_student
from distcse.teachers.lists import TeacherClient, TeacherEnsemble, WorkerTable, WorkerVectors
from distcse.teachers.targets import TargetReader
from distcse.training.checkpoints import CheckpointStore
from distcse.training.cuda_graphs import graph_mode
from distcse.training.task import StepInputs, describe_rows
from distcse.training.trainer import TrainResult, finished_state, train


class DistillationTask:
    """Trains a recipe's student with the recipe's loss terms (see `TrainingTask`).

    Args:
        spec: The run.
        loader: This worker's batches.
        clients: One per teacher, in the recipe's order.
        reporter: Its stop request ends a dev score. Default: none.
    """

    evaluates_initial_model = True

    def __init__(
        self,
        spec: TrainSpec,
        loader: BatchLoader,
        clients: Sequence[TeacherClient],
        reporter: Reporter | None = None,
    ) -> None:
        self._recipe, self._reporter = spec.recipe, reporter
        self._loader = loader
        self._clients = clients
        self._objective = build_objective(spec.recipe.objective)
        self._teachers: TeacherEnsemble | None = None
        torch.manual_seed(spec.recipe.seed)
        self.model = build_student(spec.recipe)
        self._interpolation = WeightInterpolation(self.model.encoder, spec.recipe.student.init_weight_mix)
        self._targets: TargetReader | None = None
        if spec.targets is not None and self._objective.needs_targets:
            self._targets = TargetReader(
                spec.targets.open(), lambda step: loader.sampler.batch(step)[loader.batch_slice], loader.steps
            )
        self.steps = loader.steps
        self.rows = loader.rows
        self.patience = spec.recipe.evaluation.patience

    def on_start(self, first_step: int) -> None:
        if not self._clients or not self._objective.needs_lists:
            return
        section, loader = self._recipe.teachers, self._loader
        self._teachers = TeacherEnsemble(
            self._clients,
            [teacher.alpha for teacher in section.encoders],
            loader.sampler.block,
            loader.batch_slice,
            range(first_step, loader.steps),
            section.prefetch_steps,
            self._worker_vectors(),
        )

    def _worker_vectors(self) -> WorkerVectors | None:
        """Prepare the lists that this worker computes itself; None if it computes none."""
        tables = {
            number: client.table for number, client in enumerate(self._clients) if isinstance(client, WorkerTable)
        }
        if not tables:
            return None
        return WorkerVectors(tables, self._loader.batch_slice, next(self.model.parameters()).device)

    def prepare_batch(self, step: int, device: torch.device) -> StepInputs:
        return StepInputs(
            self._loader.batch(step, device, self.model.encoder.max_length), self.teacher_outputs(step, device)
        )

    def compute_loss(self, inputs: TeacherOutputs, output: StudentOutput) -> tuple[Tensor, dict[str, Tensor]]:
        result: tuple[Tensor, dict[str, Tensor]] = self._objective(
            gather_views(output.z1, output.z2, output.detection), inputs
        )
        return result

    def teacher_outputs(self, step: int, device: torch.device) -> TeacherOutputs:
        """Return the teachers' lists and vectors of a step for this worker's rows."""
        lists = None if self._teachers is None else self._teachers.lists(step)
        targets = None if self._targets is None else torch.from_numpy(self._targets.vectors(step))
        return TeacherOutputs(lists, targets).to(device)

    def describe_batch(self, step: int) -> str:
        return describe_rows(self._loader.sampler.batch(step).tolist(), "the corpus")

    def should_evaluate(self, done: int) -> bool:
        return done % self._recipe.evaluation.eval_steps == 0

    @cached_property
    def dev(self) -> DevMetric | None:
        return DevMetric.of(self._recipe, self._loader.corpus, self._loader.held_out, self._clients, self._reporter)

    @property
    def metric_name(self) -> str | None:
        return self.dev.name if self.dev else None

    def evaluate(self) -> float:
        assert self.dev is not None
        with self._interpolation.applied_to(self.model.encoder):
            return self.dev.score(self.model.encoder)

    @property
    def teacher_wait_s(self) -> float:
        return self._teachers.wait_s if self._teachers else 0.0

    def close(self) -> None:
        """Read no further targets."""
        if self._targets is not None:
            self._targets.close()


def train_student(
    spec: TrainSpec,
    clients: Sequence[TeacherClient],
    reporter: Reporter,
    report_to_train: Callable[[dict[str, float]], None] | None = None,
) -> TrainResult:
    """Train the student of `spec` to its last step, from its latest checkpoint if there is one. Called by every worker.

    A run that has already finished returns at once.

    Args:
        spec: The run.
        clients: One per teacher, in the recipe's order.
        reporter: Receives events from rank 0. Its stop request ends the training, with a checkpoint.
        report_to_train: Called by every worker after every dev score.

    Raises:
        CorpusTooSmallError: The corpus has too few rows for the recipe.
        CUDAGraphError: training.cuda_graphs is on, but the student's forward pass cannot be recorded.
        OutOfMemoryError: A step needs more memory than the device has.
        DivergedError: A loss, a dev score or a weight is not finite.
    """
    loader = on_all_ranks(lambda: BatchLoader(spec, rank(), world_size()))
    checkpoints = CheckpointStore(spec.run.path, spec.lease)
    state = on_all_ranks(lambda: finished_state(checkpoints))
    if state is not None:
        return TrainResult(state, loader.steps, 0.0, 0.0)
    training = spec.recipe.training
    task = DistillationTask(spec, loader, clients, reporter)
    with closing(task):
        backbone, name = task.model.encoder.backbone, spec.recipe.student.backbone
        cuda_graphs = graph_mode(
            training.cuda_graphs, spec.recipe.changes_to_record, backbone, name, "training", reporter.emit
        )
        compilation = training.layer_compilation
        return train(task, training, checkpoints, reporter, report_to_train, cuda_graphs, compilation)
