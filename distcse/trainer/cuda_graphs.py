"""The training step recorded as a CUDA graph and replayed.

A step of BERT-base is some 8,000 kernel launches, which the host needs longer to issue than a fast GPU needs to run them. A graph
is one launch. It reads and writes the same memory every time: inputs are copied into the tensors it was recorded with, the
learning rate is a tensor, and dropout is drawn from a seed that is set before the replay.

Not run on a GPU yet: tests on a CPU hold all but `CudaGraphs` to the plain step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from distcse.errors import CUDAGraphError
from distcse.trainer.dropout_rng import dropout_rng, rng_is_fixed
from distcse.trainer.engines import Engine
from distcse.trainer.task import StepInputs, TakeStep, TrainingTask

T = TypeVar("T")
MOST = 8
"""Batch shapes that are recorded; steps of further shapes are taken call by call."""


class Recorder(Protocol):
    """Records a function's kernel launches."""

    def warming(self) -> AbstractContextManager[None]:
        """Run calls inside as a recording would, on the recording's stream."""
        ...

    def record(self, call: Callable[[], T]) -> Callable[[], T]:
        """Record a call without running it. Returns the replay, which gives its result in the same tensors every time."""
        ...


class CudaGraphs:
    """Records CUDA graphs on a side stream, as PyTorch requires. The graphs share one memory pool: one runs at a time."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def warming(self) -> Iterator[None]:
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)

    def record(self, call: Callable[[], T]) -> Callable[[], T]:
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # no tensor may be freed while calls are recorded
        # This thread's calls alone: a teacher's thread may allocate meanwhile.
        with first_error(torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")):
            found = call()

        def again() -> T:
            graph.replay()
            return found

        return again


@contextmanager
def first_error(recording: AbstractContextManager[Any]) -> Iterator[None]:
    """Raise the error of the call that failed: the recording's own exit raises a second one that names no cause."""
    reason: RuntimeError | None = None
    try:
        with recording:
            try:
                yield
            except RuntimeError as failed:
                reason = failed
                raise
    except RuntimeError as ended:
        raise reason or ended from None


class CudaGraphStep:
    """A training step that is recorded and replayed, for the first `MOST` batch shapes; each runs call by call once before.

    Args:
        take_step: The plain step. Its engine is the torch engine, of one worker, without accumulation; the task's inputs have one
            dropout seed, and its model keeps its tensors in place.
        recorder: Records the step.

    Raises:
        RunError: From a step that cannot be recorded.
    """

    def __init__(self, take_step: TakeStep, recorder: Recorder) -> None:
        self._take_step = take_step
        self._recorder = recorder
        self._lr: Tensor | None = None
        self._seen: set[Any] = set()
        self._recorded: dict[Any, tuple[list[Tensor], Callable[[], dict[str, Tensor]]]] = {}

    def __call__(self, engine: Engine, task: TrainingTask, inputs: StepInputs, lr: float) -> dict[str, Tensor]:
        """Take or replay the step; returns what the plain step returns."""
        if self._lr is None:
            self._lr = torch.zeros((), device=engine.device)
        self._lr.fill_(lr)  # a tensor in both ways: a resumed run takes steps call by call that were replayed before
        tensors = _parts(inputs, Tensor)
        shape = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if shape not in self._recorded and (shape not in self._seen or len(self._recorded) == MOST):
            self._seen.add(shape)
            with self._recorder.warming():
                return self._take_step(engine, task, inputs, self._lr)
        if shape not in self._recorded:
            kept = _mapped(inputs, torch.clone, Tensor)
            self._recorded[shape] = _parts(kept, Tensor), self._record(engine, task, kept, self._lr)
        old_tensors, replay = self._recorded[shape]
        for old, new in zip(old_tensors, tensors, strict=True):
            old.copy_(new)
        (seed,) = _parts(inputs, int)
        with dropout_rng(seed, engine.device):
            terms = replay()
        return {name: term.clone() for name, term in terms.items()}

    def _record(
        self, engine: Engine, task: TrainingTask, inputs: StepInputs, lr: Tensor
    ) -> Callable[[], dict[str, Tensor]]:
        def take_step() -> dict[str, Tensor]:
            with rng_is_fixed():
                return self._take_step(engine, task, inputs, lr)

        try:
            return self._recorder.record(take_step)
        except RuntimeError as refused:
            reason = str(refused).strip().partition("\n")[0]
            raise CUDAGraphError(
                f"this student's step cannot be recorded as a CUDA graph ({reason}); go on with --resume and "
                "training.cuda_graphs=false"
            ) from refused


def _parts(inputs: Any, kind: type[T]) -> list[T]:
    """All tensors among a step's inputs; or all whole numbers, which are dropout seeds."""
    found: list[T] = []

    def note(part: T) -> T:
        found.append(part)
        return part

    _mapped(inputs, note, kind)
    return found


def _mapped(inputs: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """Copy nested tuples, lists and dataclasses with every part of one type replaced by `change(part)`."""
    if isinstance(inputs, kind):
        return change(inputs)
    if is_dataclass(inputs) and not isinstance(inputs, type):
        return replace(inputs, **{at.name: _mapped(getattr(inputs, at.name), change, kind) for at in fields(inputs)})
    if isinstance(inputs, list | tuple):
        parts = [_mapped(part, change, kind) for part in inputs]
        return type(inputs)(*parts) if hasattr(inputs, "_fields") else type(inputs)(parts)
    return inputs
