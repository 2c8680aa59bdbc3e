"""Engines that carry the student's steps: DeepSpeed, and plain PyTorch behind the same interface."""

from __future__ import annotations

from importlib.util import find_spec

from torch import nn

from distcse.errors import MissingDependencyError
from distcse.recipe import LoopSection
from distcse.trainer.checkpoints import ModelState
from distcse.trainer.engines.engine import Engine
from distcse.trainer.engines.torch_engine import TorchEngine

__all__ = ["Engine", "TorchEngine", "make_engine", "uses_deepspeed"]


def make_engine(model: nn.Module, training: LoopSection, rows: int, restored: ModelState | None) -> Engine:
    """The engine the recipe asks for; `auto` is DeepSpeed where it is installed.

    Args:
        model: The student, its weights restored already.
        training: The recipe's part.
        rows: Rows of a batch on this worker.
        restored: Where the optimiser goes on from.
    """
    if not uses_deepspeed(training):
        return TorchEngine(model, training, restored)
    from distcse.trainer.engines.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(model, training, rows, restored)


def uses_deepspeed(training: LoopSection) -> bool:
    """Whether the recipe's engine comes to DeepSpeed. `RunError` where it wants it and it is not installed."""
    if training.engine == "torch":
        return False
    if find_spec("deepspeed") is not None:
        return True
    if training.zero_stage:
        raise MissingDependencyError(
            'training.zero_stage needs DeepSpeed, which is not installed; pip install "distcse[deepspeed]"'
        )
    if training.engine == "deepspeed":
        raise MissingDependencyError(
            'training.engine is deepspeed, which is not installed; pip install "distcse[deepspeed]"'
        )
    return False
