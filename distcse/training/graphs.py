"""A step that is recorded and carried out again: on a GPU as a CUDA graph.

A step of BERT-base is some 8,000 calls, which take the host longer to hand over than a fast GPU takes to carry them out. A graph
is one call. It reads and writes the same memory every time, so that inputs are copied into those that it was recorded with,
the rate is a tensor, and the noise is drawn from a seed that is set before it; the host decides nothing in it.

Not run on a GPU yet: tests on a CPU hold all but `CudaGraphs` to the plain step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from distcse.errors import RunError
from distcse.training.engines import Engine
from distcse.training.lesson import Inputs, Learned
from distcse.training.noise import noise, noise_is_set
from distcse.training.step import TrainingStep

T = TypeVar("T")
MOST = 8
"""Shapes of batches that are recorded; steps of others are taken call by call."""


class Recorder(Protocol):
    """What can record calls."""

    def warming(self) -> AbstractContextManager[None]:
        """Inside, calls run as those that are recorded will."""
        ...

    def record(self, call: Callable[[], T]) -> Callable[[], T]:
        """A call, not carried out -> what carries it out, with what it gives in the same tensors every time."""
        ...


class CudaGraphs:
    """Records on a stream of its own, as PyTorch wants it. All graphs share their memory: one runs at a time."""

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
        gc.collect()  # nothing of the device shall be let go while calls are recorded
        # Calls of this thread alone: a teacher's may ask for memory meanwhile.
        with reason_told(torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")):
            found = call()

        def again() -> T:
            graph.replay()
            return found

        return again


@contextmanager
def reason_told(recording: AbstractContextManager[Any]) -> Iterator[None]:
    """A recording that ends with why a call failed: its own end raises after that, and knows of no reason."""
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


class RecordedStep(TrainingStep):
    """A lesson's step: of the first `MOST` shapes of batches it is taken call by call once, then recorded.

    Args:
        engine: What moves the weights: the plain engine, of one worker, without accumulation.
        lesson: What is learned, with one seed of noise a step; its model keeps its tensors where they are.
        recorder: What records.

    Raises `RunError` at a step that cannot be recorded.
    """

    def __init__(self, engine: Engine, lesson: Learned, recorder: Recorder) -> None:
        super().__init__(engine, lesson)
        self._recorder = recorder
        self._lr = torch.zeros((), device=engine.device)
        self._seen: set[Any] = set()
        self._recorded: dict[Any, tuple[list[Tensor], Callable[[], dict[str, Tensor]]]] = {}

    def _take(self, inputs: Inputs, lr: float | Tensor) -> dict[str, Tensor]:
        self._lr.fill_(lr)  # for both ways: a run that goes on takes steps call by call that were recorded before
        tensors = _parts(inputs, Tensor)
        shape = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if shape not in self._recorded and (shape not in self._seen or len(self._recorded) == MOST):
            self._seen.add(shape)
            with self._recorder.warming():
                return super()._take(inputs, self._lr)
        if shape not in self._recorded:
            self._recorded[shape] = self._record(_mapped(inputs, torch.clone, Tensor))
        kept, again = self._recorded[shape]
        for old, new in zip(kept, tensors, strict=True):
            old.copy_(new)
        (seed,) = _parts(inputs, int)
        with noise(seed, self._engine.device):
            parts = again()
        return {name: part.clone() for name, part in parts.items()}

    def _record(self, kept: Inputs) -> tuple[list[Tensor], Callable[[], dict[str, Tensor]]]:
        try:
            return _parts(kept, Tensor), self._recorder.record(partial(self._with_set_noise, kept))
        except RuntimeError as refused:
            told = str(refused).strip().partition("\n")[0]
            raise RunError(
                f"this student's step cannot be recorded as a CUDA graph ({told}); go on with --resume and "
                "training.cuda_graphs=false"
            ) from refused

    def _with_set_noise(self, inputs: Inputs) -> dict[str, Tensor]:
        with noise_is_set():
            return super()._take(inputs, self._lr)


def _parts(inputs: Any, kind: type[T]) -> list[T]:
    """All tensors of a step's inputs; or all whole numbers, which are seeds of its noise."""
    found: list[T] = []

    def note(part: T) -> T:
        found.append(part)
        return part

    _mapped(inputs, note, kind)
    return found


def _mapped(inputs: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """The same tuples, lists and dataclasses with all parts of a kind changed."""
    if isinstance(inputs, kind):
        return change(inputs)
    if is_dataclass(inputs) and not isinstance(inputs, type):
        return replace(inputs, **{at.name: _mapped(getattr(inputs, at.name), change, kind) for at in fields(inputs)})
    if isinstance(inputs, list | tuple):
        parts = [_mapped(part, change, kind) for part in inputs]
        return type(inputs)(*parts) if hasattr(inputs, "_fields") else type(inputs)(parts)
    return inputs
