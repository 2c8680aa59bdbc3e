"""What is trained: a model, its batches and its loss, behind the protocol that the training loop calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from distcse.trainer.engines.engine import Engine

_SHOWN = 8


class StepInputs(NamedTuple):
    """The inputs of one step, on the engine's device: this worker's rows."""

    model: Any
    """What the model's forward takes."""
    loss: Any
    """What the loss takes beside the model's output: teachers' lists, labels."""


class TrainingTask(Protocol):
    """One training on one worker. Everything in it is a function of the step, so that a run resumes bit by bit."""

    steps: int
    """Steps of the run."""
    rows: int
    """Rows of a batch on this worker."""
    patience: int | None
    """Dev scores without a new best after which to stop; None never stops early."""
    evaluates_initial_model: bool
    """Whether the model is also scored before step 1, and may be the best."""

    @property
    def model(self) -> nn.Module:
        """The trained model."""
        ...

    def on_start(self, first_step: int) -> None:
        """Called once before the first step: requests to teachers begin here, ahead of the steps."""
        ...

    def prepare_batch(self, step: int, device: torch.device) -> StepInputs:
        """The inputs of a step. The only place in a step that may wait for teachers."""
        ...

    def compute_loss(self, inputs: Any, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """This worker's share of the global batch's loss, and its shares of each term, from `StepInputs.loss` and the output."""
        ...

    def describe_batch(self, step: int) -> str:
        """The rows of a step's global batch, for error messages."""
        ...

    def should_evaluate(self, done: int) -> bool:
        """Whether a dev score and a checkpoint follow after `done` steps; they always follow the last step."""
        ...

    @property
    def metric_name(self) -> str | None:
        """Name of the dev score; None without one: the last checkpoint is then the best."""
        ...

    def evaluate(self) -> float:
        """The dev score of the model as it is, higher is better. Called by every worker, in evaluation mode."""
        ...

    @property
    def teacher_wait_s(self) -> float:
        """Seconds spent waiting for teachers since `on_start`."""
        ...


TakeStep = Callable[[Engine, TrainingTask, StepInputs, Any], dict[str, Tensor]]
"""A step: engine, task, inputs and learning rate (a number or a tensor) to this worker's shares of the loss terms."""


def describe_rows(rows: Sequence[int], source: str) -> str:
    """`rows 3, 17, 44, … of the corpus (128)`."""
    first = ", ".join(map(str, rows[:_SHOWN]))
    return f"rows {first}{', …' if len(rows) > _SHOWN else ''} of {source} ({len(rows)})"
