"""Records the training step as a CUDA graph and replays it.

A step of BERT-base launches about 8,000 kernels, which takes the host longer than a fast GPU needs to run them. A graph is one
launch. It always reads and writes the same memory: inputs are copied into the tensors that it was recorded with, the learning
rate is a tensor, and the seeds of its random numbers are set before the replay.

The step of several workers is recorded in parts: a collective that a graph contained would wait for workers whose batches have
another shape, and that record or run eagerly while this one replays. So every worker runs the same collectives in every step.
They record only after a check (`step_check`).

Tests record on a simulated GPU, and compare with the eager step; `benchmarks/gpu.py` does so on a real one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from distcse.compat.torch import GraphRNG, leave_capture
from distcse.devices.device import default_device, defaults_of, gpu_module, has_gpu
from distcse.devices.distributed import collectives_by, rank, world_size
from distcse.errors import CUDAGraphError, first_line
from distcse.events import Listener, LogMessage
from distcse.models.fast_layers import takes_prepared_mask
from distcse.training.dropout_rng import recorded_rng
from distcse.training.task import Engine, StepInputs, TakeStep, TrainingTask

T = TypeVar("T")
Part = tuple[AbstractContextManager[Any], Callable[[], object]]
"""A graph: the context in which calls are recorded, and the function that replays them."""
Shape = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shapes and types of all tensors of a step's inputs."""
GraphMode = Literal["auto", "on", "off"]
"""Values of `cuda_graphs` in a training section."""
MAX_GRAPHS = 8
"""Maximum number of recorded batch shapes; steps with further shapes run eagerly."""
_MAX_SEEDS_IN_GRAPHS = 32
"""Maximum number of seeds in all recordings together; each seed is of a pass of thousands of kernels. The first
recording is made with any number."""


class CudaGraphs:
    """Records CUDA graphs on a side stream, as PyTorch requires. They share a memory pool, so only one can run at once."""

    def __init__(self, device: torch.device) -> None:
        self._module = gpu_module(device)
        self._stream = self._module.Stream()
        self._pool = self._module.graph_pool_handle()

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Context manager: run calls inside on the recording's stream, without recording them."""
        current = self._module.current_stream()
        self._stream.wait_stream(current)
        with self._module.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(self, call: Callable[[], T], seeds: Sequence[int]) -> Recording[T]:
        """Record a call without running it, and without its collectives."""
        recording = Recording[T](self._record_part, GraphRNG(self._module, seeds))
        current = self._module.current_stream()
        gc.collect()  # no tensor may be freed while calls are recorded
        try:
            recording.record(call)
        except RuntimeError:
            self._module.set_stream(
                current
            )  # PyTorch leaves the recording's stream only if the recording ends without an error
            self.leave()
            raise
        return recording

    def leave(self) -> None:
        """Make the GPU's random generator usable after a recording that has failed, or that another thread has not ended."""
        leave_capture(self._module)

    def _record_part(self, rng: GraphRNG) -> Part:
        graph = self._module.CUDAGraph()
        rng.register(graph)
        # thread_local: a teacher's thread may allocate during the recording.
        recording = self._module.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        return recording, graph.replay


class Recording(Generic[T]):
    """A recorded call: graphs, and between them the collectives of several workers, which a replay runs itself.

    Args:
        record_part: Makes a graph that draws from the given random numbers.
        rng: The random numbers of all graphs.
    """

    def __init__(self, record_part: Callable[[GraphRNG], Part], rng: GraphRNG) -> None:
        self._record_part, self._rng = record_part, rng
        self.parts: list[Callable[[], object]] = []
        """What a replay calls: graphs, and the collectives between them."""
        self._open_part = ExitStack()
        self.collectives: list[int] = []
        """Number of values that each collective sends."""

    def record(self, call: Callable[[], T]) -> None:
        """Record a call. Its backward pass stays in this thread, which alone can end the graph that it has begun."""
        with first_error(self._graphs()), recorded_rng(self._rng.drawing), collectives_by(self._add_collective):
            with torch.autograd.set_multithreading_enabled(False):
                self._result = call()
            self._rng.require_all()

    def __call__(self, seeds: Sequence[int]) -> T:
        """Replay the call with other seeds; return its result tensors, which are the same ones every time."""
        self._rng.seed(seeds)
        for run in self.parts:
            run()
        return self._result

    @contextmanager
    def _graphs(self) -> Iterator[None]:
        with self._open_part:
            self._begin()
            yield

    def _add_collective(self, collective: Callable[[], object], size: int) -> None:
        self._open_part.close()
        self.parts.append(collective)
        self.collectives.append(size)
        self._begin()

    def _begin(self) -> None:
        graph, replay = self._record_part(self._rng)
        self._open_part.enter_context(graph)
        self.parts.append(replay)


@contextmanager
def first_error(recording: AbstractContextManager[Any]) -> Iterator[None]:
    """Raise the error of the call that failed, not the second one that leaving the recording raises without a cause."""
    reason: RuntimeError | None = None
    try:
        with recording:
            try:
                yield
            except RuntimeError as error:
                reason = error
                raise
    except RuntimeError as exit_error:
        raise reason or exit_error from None


def records_steps(mode: GraphMode) -> bool:
    """Return whether a training in this process records its steps: on a GPU."""
    return mode != "off" and defaults_of(default_device()).records_steps


def graph_mode(
    mode: GraphMode, changes: Sequence[str], backbone: nn.Module, name: str, key: str, emit: Listener
) -> GraphMode:
    """Return the mode of a training, with `auto` off for a step that cannot be recorded; on a GPU, rank 0 says what is done."""
    problem = f"{name} inspects the attention mask in its forward pass, which cannot be recorded"
    can_record = takes_prepared_mask(backbone)
    if mode == "on" and not can_record:
        raise CUDAGraphError(f"{key}.cuda_graphs: {problem}; write {key}.cuda_graphs=off")
    if mode == "auto" and (changes or not can_record):
        reason = f"to record them, write {', '.join(changes)}" if changes else problem
        if has_gpu() and rank() == 0:
            emit(LogMessage(f"steps are not recorded as CUDA graphs ({reason})"))
        return "off"
    if records_steps(mode) and world_size() == 1:  # several workers say it after their check
        emit(LogMessage(f"steps are recorded as CUDA graphs; {key}.cuda_graphs=off runs them eagerly"))
    return mode


def open_step(
    take_step: TakeStep, device: torch.device, mode: GraphMode, emit: Listener, key: str = "training"
) -> TakeStep:
    """Return one worker's step: `take_step`, or one that records it; if it cannot be recorded, `on` raises, and `auto` warns."""
    if not records_steps(mode):
        if mode == "on":
            problem = f"{key}.cuda_graphs has no effect without a GPU; steps run eagerly"
            emit(LogMessage(problem, warning=True))
        return take_step
    return CudaGraphStep(take_step, CudaGraphs(device), None if mode == "on" else eager_steps(emit), key)


def eager_steps(emit: Listener) -> Callable[[str], None]:
    """Return the function that says why steps run eagerly."""
    return lambda reason: emit(
        LogMessage(f"steps run eagerly: they cannot be recorded as CUDA graphs ({reason})", warning=True)
    )


def recording_error(reason: str, key: str) -> CUDAGraphError:
    """Return the error of a step that must be recorded and cannot."""
    return CUDAGraphError(
        f"steps cannot be recorded as CUDA graphs ({reason}); continue with --resume and {key}.cuda_graphs=off"
    )


class CudaGraphStep:
    """Training step that is recorded and replayed for the first `MAX_GRAPHS` batch shapes, after one eager step of each.

    Args:
        take_step: The eager step. It must use a `TorchEngine`, and no gradient accumulation; all integers of the inputs are
            seeds, and the model must not replace its tensors.
        recorder: Records the step.
        on_failure: Called with the reason when the step cannot be recorded; all further steps are eager. Default: raise.
        key: Recipe key of the training's section, for messages. Default: training.
    """

    def __init__(
        self,
        take_step: TakeStep,
        recorder: CudaGraphs,
        on_failure: Callable[[str], None] | None = None,
        key: str = "training",
    ) -> None:
        self._key = key
        self._take_step = take_step
        self.recorder = recorder
        self._on_failure = on_failure
        self._has_failed = False
        self._lr: Tensor | None = None
        self._seen: set[Shape] = set()
        self._recorded: dict[Shape, tuple[list[Tensor], Recording[dict[str, Tensor]]]] = {}

    def __call__(self, engine: Engine, task: TrainingTask, inputs: StepInputs, lr: float | Tensor) -> dict[str, Tensor]:
        """Run or replay the step; see `TakeStep`."""
        tensors = _find_parts(inputs, Tensor)
        shape = _shape_of(tensors)
        if shape in self._seen - self._recorded.keys() and self._has_room(inputs) and not self._has_failed:
            try:
                self.record(engine, task, inputs)
            except RuntimeError as error:
                self._give_up(task, error)
        if shape in self._recorded:
            return self._replay(tensors, inputs, lr, shape)
        self._seen.add(shape)
        with self.recorder.warming():
            return self._take_step(engine, task, inputs, self._rate(engine, lr))

    def prepare(self, engine: Engine, task: TrainingTask, inputs: StepInputs) -> None:
        """Take a step without its collectives, so that layers are compiled, and this thread has all that its kernels need."""
        alone = collectives_by(lambda collective, size: None)
        with alone, torch.autograd.set_multithreading_enabled(False), self.recorder.warming():
            self._take_step(engine, task, inputs, self._rate(engine))

    def record(self, engine: Engine, task: TrainingTask, inputs: StepInputs) -> Recording[dict[str, Tensor]]:
        """Record the step for batches of these inputs' shape, without running it."""
        static, rate = _map_parts(inputs, torch.clone, Tensor), self._rate(engine)
        recording = self.recorder.record(lambda: self._take_step(engine, task, static, rate), _find_parts(inputs, int))
        tensors = _find_parts(static, Tensor)
        self._recorded[_shape_of(tensors)] = tensors, recording
        return recording

    def replay(self, inputs: StepInputs, lr: float | Tensor) -> dict[str, Tensor]:
        """Replay the step that was recorded for batches of these inputs' shape."""
        tensors = _find_parts(inputs, Tensor)
        return self._replay(tensors, inputs, lr, _shape_of(tensors))

    def _replay(self, tensors: list[Tensor], inputs: StepInputs, lr: float | Tensor, shape: Shape) -> dict[str, Tensor]:
        assert self._lr is not None
        self._lr.fill_(lr)
        static, recording = self._recorded[shape]
        for old, new in zip(static, tensors, strict=True):
            old.copy_(new)
        terms = recording(_find_parts(inputs, int))
        return {name: term.clone() for name, term in terms.items()}

    def _rate(self, engine: Engine, lr: float | Tensor = 0.0) -> Tensor:
        """Return the tensor of the learning rate, also for eager steps: a resumed run must compute the same as replayed ones."""
        if self._lr is None:
            self._lr = torch.zeros((), device=engine.device)
        return self._lr.fill_(lr)

    def _has_room(self, inputs: StepInputs) -> bool:
        """Return whether another shape can be recorded; all shapes have equally many seeds."""
        number, seeds = len(self._recorded), len(_find_parts(inputs, int))
        return number < MAX_GRAPHS and (number == 0 or (number + 1) * seeds <= _MAX_SEEDS_IN_GRAPHS)

    def _give_up(self, task: TrainingTask, error: RuntimeError) -> None:
        reason = first_line(error)
        if self._on_failure is None:
            if isinstance(error, torch.OutOfMemoryError):
                raise error
            raise recording_error(reason, self._key) from error
        self._has_failed = True
        self._recorded.clear()  # a failed recording can leave earlier ones with an outdated random generator
        task.model.zero_grad()  # the attempt's gradients have no values
        self._on_failure(reason)


def _shape_of(tensors: list[Tensor]) -> Shape:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def _find_parts(inputs: Any, kind: type[T]) -> list[T]:
    """Return all tensors of a step's inputs, or all integers, which are seeds."""
    found: list[T] = []

    def collect(part: T) -> T:
        found.append(part)
        return part

    _map_parts(inputs, collect, kind)
    return found


def _map_parts(inputs: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """Copy nested tuples, lists and dataclasses, replacing every part of type `kind` by `change(part)`."""
    if isinstance(inputs, kind) and not isinstance(inputs, bool):
        return change(inputs)
    if is_dataclass(inputs) and not isinstance(inputs, type):
        return replace(
            inputs, **{item.name: _map_parts(getattr(inputs, item.name), change, kind) for item in fields(inputs)}
        )
    if isinstance(inputs, list | tuple):
        parts = [_map_parts(part, change, kind) for part in inputs]
        return type(inputs)(*parts) if hasattr(inputs, "_fields") else type(inputs)(parts)
    return inputs
