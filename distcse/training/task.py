"""Interfaces of what the training loop calls: a task, with its model, its batches and its loss, and an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from distcse.training.snapshot import Snapshot

ModelInputs = TypeVar("ModelInputs")
LossInputs = TypeVar("LossInputs")
Output = TypeVar("Output", contravariant=True)

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
        """Count one batch; after every `gradient_accumulation` batches, clip the gradient and update the weights.

        Args:
            lr: Learning rate. `TorchEngine` also accepts a tensor on its device.
        """
        ...

    def snapshot(self) -> Snapshot | None:
        """Take a snapshot of full weights and moments, without waiting for a GPU. Every worker must call it.

        Returns:
            The snapshot on rank 0; None on other ranks.
        """
        ...

    def close(self) -> None:
        """Release the engine's resources."""
        ...


class StepInputs(NamedTuple, Generic[ModelInputs, LossInputs]):
    """Inputs of one step for this worker's rows, on the engine's device."""

    model_inputs: ModelInputs
    """Argument of the model's forward pass."""
    loss_inputs: LossInputs
    """Inputs of the loss other than the model's output, such as the teachers' lists or labels."""


class EvaluatedTask(Protocol):
    """The part of a training task that the log, the checkpoints and the dev scores need."""

    steps: int
    """Number of steps of the run."""
    rows: int
    """Rows of a batch on this worker."""
    patience: int | None
    """Number of dev scores without a new best after which training stops; None never stops early."""
    evaluates_initial_model: bool
    """Whether the model is also scored before the first step, and can be the best."""

    @property
    def model(self) -> nn.Module:
        """The trained model."""
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


class TrainingTask(EvaluatedTask, Protocol[ModelInputs, LossInputs, Output]):
    """One training on one worker. Everything in it is a function of the step, so that a resumed run has equal results."""

    def on_start(self, first_step: int) -> None:
        """Start prefetching from teachers. Called once, before the first step."""
        ...

    def prepare_batch(self, step: int, device: torch.device) -> StepInputs[ModelInputs, LossInputs]:
        """Return the inputs of a step. Only this method may wait for teachers."""
        ...

    def compute_loss(self, inputs: LossInputs, output: Output) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this worker's share of the global batch's loss.

        Args:
            inputs: `StepInputs.loss_inputs`.
            output: The model's output.

        Returns:
            The share of the loss, and the shares of its terms by name.
        """
        ...


class TakeStep(Protocol):
    """A training step."""

    def __call__(
        self,
        engine: Engine,
        task: TrainingTask[ModelInputs, LossInputs, Output],
        inputs: StepInputs[ModelInputs, LossInputs],
        lr: float | Tensor,
    ) -> dict[str, Tensor]:
        """Return this worker's shares of the loss terms, on the device."""
        ...


def describe_rows(rows: Sequence[int], source: str) -> str:
    """Format rows as `rows 3, 17, 44, … of the corpus (128)`."""
    first = ", ".join(map(str, rows[:_MAX_SHOWN_ROWS]))
    return f"rows {first}{', …' if len(rows) > _MAX_SHOWN_ROWS else ''} of {source} ({len(rows)})"
