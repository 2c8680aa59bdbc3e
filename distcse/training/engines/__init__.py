"""Engines for forward, backward and update: DeepSpeed and plain PyTorch, with the same interface."""

from __future__ import annotations

from importlib.util import find_spec

from torch import nn

from distcse.devices.host import pip_install
from distcse.errors import MissingDependencyError
from distcse.recipe import LoopSection
from distcse.training.checkpoint_files import ModelState
from distcse.training.engines.torch_engine import TorchEngine
from distcse.training.task import Engine

__all__ = ["TorchEngine", "describe_engine", "make_engine", "uses_deepspeed"]


def make_engine(
    model: nn.Module, training: LoopSection, rows: int, restored: ModelState | None, records_steps: bool = False
) -> Engine:
    """Create the recipe's engine; `auto` is DeepSpeed if it is installed and no steps are recorded, else PyTorch."""
    if records_steps or not uses_deepspeed(training):
        return TorchEngine(model, training, restored, records_steps)
    from distcse.training.engines.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(model, training, rows, restored)


def describe_engine(engine: Engine, records_steps: bool) -> str:
    """Say which engine `auto` has chosen, and why."""
    if not isinstance(engine, TorchEngine):
        return "engine DeepSpeed: it is installed, and steps are not recorded as CUDA graphs"
    return f"engine PyTorch: {'its steps can be recorded as CUDA graphs' if records_steps else 'DeepSpeed is not installed'}"


def uses_deepspeed(training: LoopSection) -> bool:
    """Return whether the recipe's engine is DeepSpeed; raise `MissingDependencyError` if it is required and not installed."""
    if training.engine == "torch":
        return False
    if find_spec("deepspeed") is not None:
        return True
    if training.zero_stage or training.engine == "deepspeed":
        key = "training.zero_stage" if training.zero_stage else "training.engine: deepspeed"
        raise MissingDependencyError(f"{key} needs DeepSpeed, which is not installed; {pip_install('deepspeed')}")
    return False
