"""Several workers record their step, and compile its layers, only if that agrees with the eager step on all of them.

No developer's machine has the GPUs of all users. So a run finds out for itself, at its first step: it takes the step eagerly,
records it and replays it on the same batch with the same seeds, and compares. What can fail or hang runs no collective, and in a
thread that can be left behind; then all workers tell each other whether it succeeded.

A replay runs collectives, which cannot be left: all workers replay, or none does, and only recordings with the same collectives.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distcse.devices.device import gpu_module
from distcse.devices.distributed import gather_objects
from distcse.errors import first_line
from distcse.events import Listener, LogMessage
from distcse.training.compiled_step import COMPILING, CompiledStep
from distcse.training.cuda_graphs import CudaGraphs, CudaGraphStep, GraphMode, eager_steps, recording_error
from distcse.training.engines import TorchEngine
from distcse.training.task import Engine, StepInputs, TakeStep, TrainingTask

RECORDING_S, COMPILING_S = 60.0, 300.0
"""Seconds after which a recording, or a compilation before it, counts as failed."""
RECORDED, COMPILED = 1e-3, 0.5
"""Largest relative differences of a loss or a gradient's norm from those of the eager step. Replayed kernels are the same, and
may only add in another order. Compiled layers draw other dropout masks, so theirs says only that the step is no nonsense."""


class Candidate(NamedTuple):
    """A step that may replace the eager one."""

    what: str
    """What it is, for messages."""
    step: CudaGraphStep
    tolerance: float
    limit_s: float
    on_failure: Callable[[str], None]
    """Called with the reason if workers do not agree on it."""


class _LeftBehindError(BaseException):
    """Stops a thread that was left behind where it is, should it continue after all.

    It must not touch the weights, gradients and random generator of the steps that are taken meanwhile, not even to restore them.
    """

    def __init__(self) -> None:
        threading.Event().wait()


@dataclass(frozen=True)
class _Measured:
    """What is compared: a worker's share of the loss, and the norm of the global gradient."""

    loss: float
    norm: float

    def difference(self, other: _Measured, tolerance: float) -> str:
        """Describe the difference from the eager step; empty if it is within a relative tolerance."""
        for name, mine, eager in (("loss", self.loss, other.loss), ("gradient's norm", self.norm, other.norm)):
            if not abs(mine - eager) <= tolerance * abs(eager):  # also where one is not a number
                return f"its {name} is {mine:.6g}, and the eager step's {eager:.6g}"
        return ""


def open_checked_step(
    take_step: TakeStep, device: torch.device, mode: GraphMode, compiles: bool, emit: Listener, key: str
) -> TakeStep:
    """Return the step of several workers on GPUs: recorded, with compiled layers if `compiles`, and else as `take_step`.

    If workers do not agree on it, `on` raises `CUDAGraphError`, and `auto` says so in one line.
    """

    def refuse(reason: str) -> None:
        raise recording_error(reason, key)

    def run_uncompiled(reason: str) -> None:
        emit(LogMessage(f"layers run uncompiled: torch.compile failed ({reason})", warning=True))

    run_eagerly = None if mode == "on" else eager_steps(emit)
    what = f"steps are recorded as CUDA graphs ({key}.cuda_graphs=off runs them eagerly)"
    recorded = CudaGraphStep(take_step, CudaGraphs(device), run_eagerly, key)
    candidates = [Candidate(what, recorded, RECORDED, RECORDING_S, run_eagerly or refuse)]
    if compiles:
        emit(LogMessage(COMPILING))
        compiled = CudaGraphStep(CompiledStep(take_step, on_failure=None), CudaGraphs(device), run_eagerly, key)
        limit = RECORDING_S + COMPILING_S
        candidates.insert(0, Candidate(f"layers are compiled, and {what}", compiled, COMPILED, limit, run_uncompiled))
    return CheckedStep(take_step, candidates, emit)


class CheckedStep:
    """Training step of several workers: the first of its candidates on which all agree, else the eager step."""

    def __init__(self, take_step: TakeStep, candidates: list[Candidate], emit: Listener) -> None:
        self._take_step, self._candidates, self._emit = take_step, candidates, emit
        self._chosen: TakeStep | None = None

    def __call__(self, engine: Engine, task: TrainingTask, inputs: StepInputs, lr: float | Tensor) -> dict[str, Tensor]:
        """Run the step; see `TakeStep`. The first one is taken several times, and counts once."""
        if self._chosen is not None:
            return self._chosen(engine, task, inputs, lr)
        assert isinstance(engine, TorchEngine)
        begun, (before, problem) = time.perf_counter(), _copied(engine)
        if reason := _agreed(problem):
            self._candidates[-1].on_failure(reason)
            self._candidates.clear()
        else:
            eager = _measured(engine, self._take_step(engine, task, inputs, lr))
        for candidate in self._candidates:
            reason = _agreed(*_recorded(candidate, engine, task, inputs))
            _restore(engine, task, before)
            if not reason:
                terms = candidate.step.replay(inputs, lr)
                reason = _agreed(_measured(engine, terms).difference(eager, candidate.tolerance))
            if not reason:
                seconds = time.perf_counter() - begun
                self._emit(LogMessage(f"{candidate.what}; workers agreed with the eager step in {seconds:.1f} s"))
                self._chosen = candidate.step
                return terms
            candidate.step.recorder.leave()
            _restore(engine, task, before)
            candidate.on_failure(reason)
        self._chosen = self._take_step
        return self._take_step(engine, task, inputs, lr)


def _agreed(problem: str, collectives: Sequence[int] = ()) -> str:
    """Exchange what workers have found: return the first problem, or that recordings differ; empty if all agree."""
    found = gather_objects((problem, tuple(collectives)))
    problems = [f"worker {rank}: {problem}" for rank, (problem, _) in enumerate(found) if problem]
    if not problems and len(set(found)) > 1:
        problems = ["workers have recorded different collectives"]
    return problems[0] if problems else ""


def _recorded(
    candidate: Candidate, engine: TorchEngine, task: TrainingTask, inputs: StepInputs
) -> tuple[str, Sequence[int]]:
    """Record a candidate's step; return why it failed, and the sizes of its collectives."""
    module, answers = gpu_module(engine.device), list[tuple[str, Sequence[int]]]()
    device = module.current_device()

    def record() -> None:
        module.set_device(device)
        try:
            candidate.step.prepare(engine, task, inputs)
            answers.append(("", candidate.step.record(engine, task, inputs).collectives))
        except Exception as error:  # whatever it is, the other workers wait for the answer
            answers.append((first_line(error), ()))

    thread = threading.Thread(target=record, name="step-check", daemon=True)
    thread.start()
    thread.join(candidate.limit_s)
    if answers:
        return answers[0]
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_LeftBehindError))
    return f"recording has not ended after {candidate.limit_s:g} s", ()


def _measured(engine: TorchEngine, terms: dict[str, Tensor]) -> _Measured:
    return _Measured(float(terms["loss"]), float(engine.optimizer.gradient_norm))


def _copied(engine: TorchEngine) -> tuple[dict[tuple[str, str], Tensor], str]:
    """Copy all that a step changes; if the memory does not suffice, say so."""
    try:
        return {name: tensor.clone() for name, tensor in engine.state().items()}, ""
    except torch.OutOfMemoryError as error:
        return {}, first_line(error)


def _restore(engine: TorchEngine, task: TrainingTask, before: dict[tuple[str, str], Tensor]) -> None:
    """Go back to a copied state. The first step has created the moments, which begin at 0."""
    for name, tensor in engine.state().items():
        tensor.copy_(before[name]) if name in before else tensor.zero_()
    task.model.zero_grad()
