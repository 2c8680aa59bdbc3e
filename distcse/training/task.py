"""Interfaces of what the training loop calls: a task, with its model, its batches and its loss, and an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from distcse.training.snapshot import Snapshot

_MAX_SHOWN_ROWS = 8


class Engine(Protocol):
    """Runs the student's forward pass, backward pass and update across all workers."""

    device: torch.device
    """Device of the model."""

    def forward(self, inputs: object) -> Any:
        """Return the model's output, computed in the engine's precision."""
        ...

    def backward(self, share: Tensor) -> None:
        """Accumulate the gradient of this worker's share of the loss. All workers' shares sum to the global batch's loss."""
        ...

    def step(self, lr: float | Tensor) -> None:
        """Count one batch; after every `gradient_accumulation` batches, clip the gradient and update the weights."""
        ...

    def snapshot(self) -> Snapshot | None:
        """Take a snapshot of full weights and moments on rank 0, without waiting for a GPU. Every worker must call it."""
        ...

    def close(self) -> None:
        """Release the engine's resources."""
        ...


class StepInputs(NamedTuple):
    """Inputs of one step for this worker's rows, on the engine's device."""

    model_inputs: Any
    """Argument of the model's forward pass."""
    loss_inputs: Any
    """Inputs of the loss other than the model's output, such as the teachers' lists or labels."""


class TrainingTask(Protocol):
    """One training on one worker. Everything in it is a function of the step, so that a resumed run has equal results."""

    steps: int
    """Number of steps of the run."""
    rows: int
    """Rows of a batch on this worker."""
    evaluates_initial_model: bool
    """Whether the model is also scored before the first step, and can be the best."""

    @property
    def model(self) -> nn.Module:
        """The trained model."""
        ...

    def on_start(self, first_step: int) -> None:
        """Start prefetching from teachers. Called once, before the first step."""
        ...

    def prepare_batch(self, step: int, device: torch.device) -> StepInputs:
        """Return the inputs of a step. Only this method may wait for teachers."""
        ...

    def compute_loss(self, inputs: Any, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this worker's share of the global batch's loss, and the shares of its terms by name.

        Args:
            inputs: `StepInputs.loss_inputs`.
            output: The model's output.
        """
        ...

    def describe_batch(self, step: int) -> str:
        """Describe the rows of a step's global batch, for error messages."""
        ...

    def should_evaluate(self, done: int) -> bool:
        """Return whether to score and save the model after `done` steps. The last step is always followed by both."""
        ...

    @property
    def metric_name(self) -> str | None:
        """Name of the dev score. None if there is none; the last checkpoint is then the best."""
        ...

    def evaluate(self) -> float:
        """Return the current model's dev score; higher is better. Called by every worker, in evaluation mode.

        Raises:
            StoppedEarlyError: A stop was requested meanwhile. Raised on every worker.
        """
        ...

    @property
    def teacher_wait_s(self) -> float:
        """Seconds spent waiting for teachers since `on_start`."""
        ...


TakeStep = Callable[[Engine, TrainingTask, StepInputs, float | Tensor], dict[str, Tensor]]
"""A training step: returns this worker's shares of the loss terms, on the device."""


def describe_rows(rows: Sequence[int], source: str) -> str:
    """Format rows as `rows 3, 17, 44, … of the corpus (128)`."""
    first = ", ".join(map(str, rows[:_MAX_SHOWN_ROWS]))
    return f"rows {first}{', …' if len(rows) > _MAX_SHOWN_ROWS else ''} of {source} ({len(rows)})"
