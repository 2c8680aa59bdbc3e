"""Training steps whose layers are compiled: `torch.compile` fuses a layer's element-wise work between its matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distcse.compat.torch import compile_layer
from distcse.errors import EncoderError, first_line
from distcse.events import Listener, LogMessage
from distcse.models.fast_layers import replace_forward
from distcse.models.student import layers_of
from distcse.training.dropout_rng import is_recording
from distcse.training.task import Engine, StepInputs, TakeStep, TrainingTask

CompileMode = Literal["auto", "on", "off"]
"""Values of `training.compile_layers`."""
MIN_STEPS = 2000
"""Steps of a run from which `auto` compiles: compiling takes about as long as 1,000 of BERT-base's steps save."""
COMPILING = "layers are compiled, which takes up to a minute; training.compile_layers=off leaves it out"


def compiles_layers(mode: CompileMode, steps: int, is_recorded: bool) -> bool:
    """Return whether a run compiles the trained layers; see `open_compiled_step`."""
    return is_recorded and (mode == "on" or (mode == "auto" and steps >= MIN_STEPS))


def open_compiled_step(
    take_step: TakeStep, mode: CompileMode, steps: int, is_recorded: bool, emit: Listener
) -> TakeStep:
    """Return one worker's step: `take_step`, or one that compiles the trained layers.

    Args:
        take_step: The step without compiled layers.
        mode: `auto` compiles recorded steps of runs of at least `MIN_STEPS` steps, `on` all recorded steps.
        steps: Steps of the run.
        is_recorded: Whether steps are recorded as CUDA graphs.
        emit: Receives what was chosen.
    """
    if mode == "on" and not is_recorded:
        emit(
            LogMessage(
                "training.compile_layers has no effect where steps are not recorded as CUDA graphs", warning=True
            )
        )
    if not compiles_layers(mode, steps, is_recorded):
        return take_step

    def run_uncompiled(reason: str) -> None:
        emit(LogMessage(f"layers run uncompiled: torch.compile failed ({reason})", warning=True))

    emit(LogMessage(COMPILING))
    return CompiledStep(take_step, run_uncompiled)


class CompiledStep:
    """Training step that compiles the layers of all trained backbones; evaluations use the layers as they are.

    The last layer is not compiled where only one token per text is computed (`last_layer_at`).

    Args:
        take_step: The step without compiled layers.
        on_failure: Called with the reason when a layer cannot be compiled; this and all further steps run uncompiled. None
            raises: a step of several workers cannot be repeated, as its collectives have run.
        compile_forward: Compiles a layer's `forward`.
    """

    def __init__(
        self,
        take_step: TakeStep,
        on_failure: Callable[[str], None] | None,
        compile_forward: Callable[[Callable[..., Any]], Callable[..., Any]] = compile_layer,
    ) -> None:
        self._take_step = take_step
        self._on_failure = on_failure
        self._compile = compile_forward
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] | None = None

    def __call__(self, engine: Engine, task: TrainingTask, inputs: StepInputs, lr: float | Tensor) -> dict[str, Tensor]:
        """Run the step; see `TakeStep`."""
        if self._forwards is None:
            self._forwards = [(layer, self._compile(layer.forward)) for layer in trained_layers(task.model)]
        if not self._forwards:
            return self._take_step(engine, task, inputs, lr)
        try:
            with self._compiled_layers():
                return self._take_step(engine, task, inputs, lr)
        except RuntimeError as error:  # PyTorch compiles forward and backward pass when they are first called
            if self._on_failure is None or is_recording() or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = first_line(error)
        self._forwards = []
        task.model.zero_grad()  # the backward pass may have stopped halfway
        self._on_failure(reason)
        return self._take_step(engine, task, inputs, lr)

    @contextmanager
    def _compiled_layers(self) -> Iterator[None]:
        with ExitStack() as stack:
            for layer, forward in self._forwards or []:
                stack.enter_context(replace_forward(layer, forward))
            yield


def trained_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of all trained backbones in a model; none of backbones that repeat one layer, such as ALBERT."""
    from transformers import PreTrainedModel  # takes seconds, which plans and checks of search spaces do not need

    found: dict[nn.Module, None] = {}
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        try:
            layers = layers_of(part)
        except EncoderError:
            continue
        found.update(dict.fromkeys(layer for layer in layers if any(p.requires_grad for p in layer.parameters())))
    return list(found)
