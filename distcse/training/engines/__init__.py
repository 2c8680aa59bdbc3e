"""Engines that carry the student's steps: DeepSpeed, and plain PyTorch behind the same interface."""

from __future__ import annotations

from importlib.util import find_spec

from torch import nn

from distcse.errors import RunError
from distcse.recipe import LoopSection
from distcse.training.checkpoint import TrainingState
from distcse.training.engines.engine import Engine
from distcse.training.engines.plain import PlainEngine

__all__ = ["Engine", "PlainEngine", "make_engine", "uses_deepspeed"]


def make_engine(model: nn.Module, training: LoopSection, rows: int, restored: TrainingState | None) -> Engine:
    """The engine the recipe asks for; `auto` is DeepSpeed where it is installed.

    Args:
        model: The student, its weights restored already.
        training: The recipe's part.
        rows: Rows of a batch on this worker.
        restored: Where the optimiser goes on from.
    """
    if not uses_deepspeed(training):
        return PlainEngine(model, training, restored)
    from distcse.training.engines.zero import DeepSpeedEngine

    return DeepSpeedEngine(model, training, rows, restored)


def uses_deepspeed(training: LoopSection) -> bool:
    """Whether the recipe's engine comes to DeepSpeed. `RunError` where it wants it and it is not installed."""
    if training.engine == "plain":
        return False
    if find_spec("deepspeed") is not None:
        return True
    if training.zero_stage:
        raise RunError('training.zero_stage needs DeepSpeed, which is not installed; pip install "distcse[deepspeed]"')
    if training.engine == "deepspeed":
        raise RunError('training.engine is deepspeed, which is not installed; pip install "distcse[deepspeed]"')
    return False
