"""One step of a training: from its inputs to moved weights."""

from __future__ import annotations

from torch import Tensor

from distcse.training.engines import Engine
from distcse.training.lesson import Inputs, Learned


class TrainingStep:
    """A lesson's step, taken call by call.

    Args:
        engine: What moves the weights.
        lesson: What is learned.
    """

    def __init__(self, engine: Engine, lesson: Learned) -> None:
        self._engine, self._lesson = engine, lesson

    def __call__(self, step: int, lr: float) -> dict[str, Tensor]:
        """Take it at a rate; this worker's shares of the loss and its parts."""
        self._lesson.model.train()
        return self._take(self._lesson.inputs(step, self._engine.device), lr)

    def _take(self, inputs: Inputs, lr: float | Tensor) -> dict[str, Tensor]:
        share, parts = self._lesson.loss(inputs.loss, self._engine.forward(inputs.model))
        self._engine.backward(share)
        self._engine.step(lr)
        return parts
