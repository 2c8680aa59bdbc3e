"""Records the training step as a CUDA graph and replays it.

A step of BERT-base launches about 8,000 kernels, which takes the host longer than a fast GPU needs to run them. A graph is one
launch. It always reads and writes the same memory: inputs are copied into the tensors that it was recorded with, the learning
rate is a tensor, and the seeds of its random numbers are set before the replay.

Tests record on a simulated GPU, and compare with the eager step; `benchmarks/gpu.py` does so on a real one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from distcse.compat.torch import GraphRNG, leave_capture
from distcse.devices.device import default_device, defaults_of, gpu_module, has_gpu
from distcse.devices.distributed import rank, world_size
from distcse.errors import CUDAGraphError, first_line
from distcse.events import Listener, LogMessage
from distcse.models.fast_layers import takes_prepared_mask
from distcse.training.dropout_rng import recorded_rng
from distcse.training.task import Engine, StepInputs, TakeStep, TrainingTask

T = TypeVar("T")
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

    def record(self, call: Callable[[], T], seeds: Sequence[int]) -> Callable[[Sequence[int]], T]:
        """Record a call without running it; return a function that replays it with other seeds, into the same result tensors."""
        module, graph, rng = self._module, self._module.CUDAGraph(), GraphRNG(self._module, seeds)
        rng.register(graph)
        current = module.current_stream()
        gc.collect()  # no tensor may be freed while calls are recorded
        # thread_local: a teacher's thread may allocate during the recording.
        recording = module.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        try:
            with first_error(recording), recorded_rng(rng.drawing):
                result = call()
                rng.require_all()
        except RuntimeError:
            module.set_stream(
                current
            )  # PyTorch leaves the recording's stream only if the recording ends without an error
            leave_capture(module)
            raise

        def replay(seeds: Sequence[int]) -> T:
            rng.seed(seeds)
            graph.replay()
            return result

        return replay


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
    """Return whether a training in this process records its steps: that of one worker, on a GPU."""
    return mode != "off" and world_size() == 1 and defaults_of(default_device()).records_steps


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
    if records_steps(mode):
        emit(LogMessage(f"steps are recorded as CUDA graphs; {key}.cuda_graphs=off runs them eagerly"))
    return mode


def open_step(
    take_step: TakeStep, device: torch.device, mode: GraphMode, emit: Listener, key: str = "training"
) -> TakeStep:
    """Return the step to take: `take_step`, or one that records it; if it cannot be recorded, `on` raises, and `auto` warns."""
    if not records_steps(mode):
        if mode == "on":
            problem = f"{key}.cuda_graphs has no effect without a GPU; steps run eagerly"
            emit(LogMessage(problem, warning=True))
        return take_step

    def run_eagerly(reason: str) -> None:
        emit(LogMessage(f"steps run eagerly: they cannot be recorded as CUDA graphs ({reason})", warning=True))

    return CudaGraphStep(take_step, CudaGraphs(device), None if mode == "on" else run_eagerly, key)


class CudaGraphStep:
    """Training step that is recorded and replayed for the first `MAX_GRAPHS` batch shapes, after one eager step of each.

    Args:
        take_step: The eager step. It must use a `TorchEngine` with `records_steps`, and no gradient accumulation; all
            integers of the inputs are seeds, and the model must not replace its tensors.
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
        self._recorder = recorder
        self._on_failure = on_failure
        self._has_failed = False
        self._lr: Tensor | None = None
        self._seen: set[Any] = set()
        self._recorded: dict[Any, tuple[list[Tensor], Callable[[Sequence[int]], dict[str, Tensor]]]] = {}

    def __call__(self, engine: Engine, task: TrainingTask, inputs: StepInputs, lr: float | Tensor) -> dict[str, Tensor]:
        """Run or replay the step; see `TakeStep`."""
        if self._lr is None:
            self._lr = torch.zeros((), device=engine.device)
        self._lr.fill_(lr)  # also a tensor in eager steps: a resumed run must compute the same as replayed ones
        tensors = _find_parts(inputs, Tensor)
        shape = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        seeds = _find_parts(inputs, int)
        if shape in self._seen - self._recorded.keys() and self._has_room(len(seeds)) and not self._has_failed:
            static_inputs = _map_parts(inputs, torch.clone, Tensor)
            recorded = self._record(engine, task, static_inputs, seeds, self._lr)
            if recorded is not None:
                self._recorded[shape] = _find_parts(static_inputs, Tensor), recorded
        if shape not in self._recorded:
            self._seen.add(shape)
            with self._recorder.warming():
                return self._take_step(engine, task, inputs, self._lr)
        static_tensors, replay = self._recorded[shape]
        for static, new in zip(static_tensors, tensors, strict=True):
            static.copy_(new)
        terms = replay(seeds)
        return {name: term.clone() for name, term in terms.items()}

    def _has_room(self, seeds: int) -> bool:
        """Return whether another shape can be recorded; all shapes have equally many seeds."""
        number = len(self._recorded)
        return number < MAX_GRAPHS and (number == 0 or (number + 1) * seeds <= _MAX_SEEDS_IN_GRAPHS)

    def _record(
        self, engine: Engine, task: TrainingTask, inputs: StepInputs, seeds: Sequence[int], lr: Tensor
    ) -> Callable[[Sequence[int]], dict[str, Tensor]] | None:
        """Record the step; None if it cannot be recorded and `on_failure` is there."""
        try:
            return self._recorder.record(lambda: self._take_step(engine, task, inputs, lr), seeds)
        except RuntimeError as error:
            reason = first_line(error)
            if self._on_failure is None:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise CUDAGraphError(
                    f"the model's step cannot be recorded as a CUDA graph ({reason}); continue with --resume and "
                    f"{self._key}.cuda_graphs=off"
                ) from error
        self._has_failed = True
        self._recorded.clear()  # a failed recording can leave earlier ones with an outdated random generator
        task.model.zero_grad()  # the attempt's gradients have no values
        self._on_failure(reason)
        return None


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
