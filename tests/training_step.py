"""Single training steps of a distillation, for tests that count or compare what one step does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distcse.runs.distillation.distillation_task import BatchLoader, DistillationTask, TrainSpec
from distcse.teachers.lists import TeacherClient
from distcse.text import TokenTable
from distcse.training.engines import make_engine
from distcse.training.schedule import warmup_then_linear
from distcse.training.trainer import training_step


class TrainingStep:
    """A run's training steps, called one by one: inputs, forward pass, loss, backward pass, update.

    Args:
        spec: The run.
        sources: Clients of its teachers.
        rank: This worker's rank. Default: 0.
        workers: Number of workers. Default: 1.
    """

    def __init__(self, spec: TrainSpec, sources: Sequence[TeacherClient], rank: int = 0, workers: int = 1) -> None:
        self.loader = BatchLoader(spec, rank, workers)
        self.task = DistillationTask(spec, self.loader, sources)
        self.token_table = TokenTable.open(spec.tokens)
        self.section = spec.recipe.training
        self.engine = make_engine(self.task.model, self.section, self.task.rows, None)
        self.step = 0
        self.task.on_start(0)

    def __call__(self) -> float | torch.Tensor:
        """Take one step, and return its loss on the device."""
        self.task.model.train()
        inputs = self.task.prepare_batch(self.step, self.engine.device)
        lr = self.section.lr * warmup_then_linear(0, self.task.steps, 0.0)
        terms = training_step(self.engine, self.task, inputs, lr)
        self.step += 1
        return terms["loss"]

    def loss(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the next step's loss and its terms, without an update."""
        inputs = self.task.prepare_batch(self.step, self.engine.device)
        return self.task.compute_loss(inputs.loss_inputs, self.engine.forward(inputs.model_inputs))

    def rows(self, step: int) -> Any:
        """Return the (N,) row ids of a step."""
        return self.loader.sampler.batch(step)

    def tokens(self, step: int) -> list[Any]:
        """Return the token ids of a step's rows."""
        rows: list[Any] = self.token_table.rows(self.rows(step))
        return rows
