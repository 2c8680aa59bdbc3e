"""What a student learns from lists: two views of a batch of sentences, and how alike the teachers find them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from distcse.device import to_device
from distcse.errors import CUDAGraphError
from distcse.events import Reporter
from distcse.experiments.distillation.batch_loader import BatchLoader, TrainSpec
from distcse.experiments.distillation.dev_metric import DevMetric
from distcse.experiments.distillation.model import StudentOutput, build_student
from distcse.experiments.distillation.weight_interpolation import WeightInterpolation
from distcse.losses import TeacherOutputs, build_objective, gather_views
from distcse.models.attention import takes_prepared_mask
from distcse.teachers.ensemble import TeacherClient, TeacherEnsemble
from distcse.teachers.teacher_weights import TeacherWeights
from distcse.trainer.async_evaluator import AsyncEvaluator
from distcse.trainer.checkpoints import CheckpointStore
from distcse.trainer.distributed import on_all_ranks, rank, world_size
from distcse.trainer.task import StepInputs, describe_rows
from distcse.trainer.trainer import TrainResult, finished_state, train


class LossContext(NamedTuple):
    """What a step's loss takes beside the views."""

    teachers: TeacherOutputs
    """The teachers' lists and vectors of this worker's rows."""
    duplicate_mask: Tensor | None
    """(R, K) whether a sentence of the queue is one of the rows; None without a queue."""


class DistillationTask:
    """A recipe's terms on a recipe's text (see `TrainingTask`).

    Args:
        job: The run.
        plan: This worker's rows.
        sources: The teachers, in the recipe's order.
    """

    evaluates_initial_model = True

    def __init__(self, spec: TrainSpec, plan: BatchLoader, sources: Sequence[TeacherClient]) -> None:
        self._recipe = spec.recipe
        self._plan = plan
        self._sources = sources
        self._objective = build_objective(spec.recipe.objective)
        self._teachers: TeacherEnsemble | None = None
        torch.manual_seed(spec.recipe.seed)
        self.model = build_student(spec.recipe)
        self._start = WeightInterpolation(self.model.encoder, spec.recipe.student.init_weight_mix)
        self._targets = spec.targets.open() if spec.targets is not None and self._objective.needs_targets else None
        self.steps = plan.steps
        self.rows = plan.rows
        self.patience = spec.recipe.evaluation.patience

    def on_start(self, first_step: int) -> None:
        if not self._sources or not self._objective.needs_lists:
            return
        section, plan = self._recipe.teachers, self._plan
        self._teachers = TeacherEnsemble(
            self._sources,
            TeacherWeights(section.encoders, plan.corpus).of,
            plan.block,
            plan.places,
            range(first_step, plan.steps),
            section.prefetch_steps,
            plan.shuffle,
            section.disagreement_scale,
        )

    def prepare_batch(self, step: int, device: torch.device) -> StepInputs:
        return StepInputs(
            self._plan.batch(step, device),
            LossContext(self._teacher_outputs(step, device), self._duplicate_mask(step, device)),
        )

    def compute_loss(self, inputs: LossContext, output: StudentOutput) -> tuple[Tensor, dict[str, Tensor]]:
        memory = self.model.memory
        views = gather_views(output.z1, output.z2, memory.vectors if memory else None, inputs.duplicate_mask)
        share, parts = self._objective(views, inputs.teachers, output.found)
        if memory is not None:
            memory.push(views.all_z1)
        return share, parts

    def _teacher_outputs(self, step: int, device: torch.device) -> TeacherOutputs:
        taught = self._teachers.teacher_outputs(step).to(device) if self._teachers else TeacherOutputs()
        if self._targets is None:
            return taught
        rows = self._plan.sampler.batch(step)[self._plan.places]
        return replace(taught, targets=to_device(torch.from_numpy(self._targets.vectors(rows)), device))

    def _duplicate_mask(self, step: int, device: torch.device) -> Tensor | None:
        met = self._plan.duplicate_mask(step)
        return None if met is None else to_device(torch.from_numpy(met), device)

    def describe_batch(self, step: int) -> str:
        return describe_rows(self._plan.sampler.batch(step).tolist(), "the corpus")

    def should_evaluate(self, done: int) -> bool:
        return done % self._recipe.evaluation.eval_steps == 0

    @cached_property
    def _dev(self) -> DevMetric | None:
        return DevMetric.of(self._recipe, self._plan.corpus, self._plan.held_out, self._sources)

    @property
    def metric_name(self) -> str | None:
        return self._dev.name if self._dev else None

    def evaluate(self) -> float:
        assert self._dev is not None
        with self._start.mixed_into(self.model.encoder):
            return self._dev.score(self.model.encoder)

    @property
    def teacher_wait_s(self) -> float:
        return self._teachers.waited if self._teachers else 0.0


def fit(
    spec: TrainSpec,
    sources: Sequence[TeacherClient],
    reporter: Reporter,
    report: Callable[[dict[str, float]], None] | None = None,
    scorer: AsyncEvaluator | None = None,
) -> TrainResult:
    """Train the student of `spec` to its end, from its latest checkpoint where it has one; see `train`.

    Args:
        job: The run.
        sources: The teachers, in the recipe's order.
        reporter: Receives events from rank 0; its stop request ends the run, with a checkpoint, at the next report.
        report: Called by every worker after every dev score.
        scorer: Makes dev scores beside the training; None makes them here.
    """
    plan = on_all_ranks(lambda: BatchLoader(spec, rank(), world_size()))
    checkpoints = CheckpointStore(spec.run, spec.lease)
    state = on_all_ranks(lambda: finished_state(checkpoints))
    if state is not None:
        return TrainResult(state, plan.steps, 0.0, 0.0)
    training = spec.recipe.training
    task = DistillationTask(spec, plan, sources)
    if training.cuda_graphs and not takes_prepared_mask(task.model.encoder.backbone):
        raise CUDAGraphError(
            f"training.cuda_graphs: {spec.recipe.student.backbone} asks in its steps what of a batch is padding, which no "
            "recording can; write training.cuda_graphs=false"
        )
    return train(task, training, checkpoints, reporter, report, scorer, training.cuda_graphs)
