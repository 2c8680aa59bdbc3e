"""State of the simulated GPU: counted waits and operations, memory, the random generator, and the recording of a graph."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.gpusim.graphs import CUDAGraph

ROOT = Path(__file__).parents[2]
_PRODUCT = f"{ROOT / 'distcse'}/"
_PROJECT = (_PRODUCT, f"{ROOT / 'tests'}/", f"{ROOT / 'benchmarks'}/")
_OWN = f"{Path(__file__).parent}/"


class Generator:
    """A random generator of the device: a pointer to a state, which generators can share.

    Args:
        state: The state; a new one by default.
    """

    def __init__(self, state: torch.Generator | None = None) -> None:
        self.state = state or torch.Generator()

    def manual_seed(self, seed: int) -> None:
        self.state.manual_seed(seed)

    def clone_state(self) -> Generator:
        """Return a generator with a copy of the state."""
        return Generator(self.state.clone_state())

    def graphsafe_get_state(self) -> Generator:
        """Return a generator that shares the state."""
        return Generator(self.state)

    def graphsafe_set_state(self, other: Generator) -> None:
        """Share another generator's state."""
        self.state = other.state


GENERATOR = Generator()
"""The device's random generator. `torch.manual_seed` seeds it, also outside of a simulation."""


@dataclass
class _InjectedFailure:
    at: str
    skipped: int
    times: int


@dataclass
class Simulation:
    """What happened on the device while `simulated()` was entered.

    Attributes:
        waits: Number of waits by `KIND @ distcse/FILE.py:LINE`, the innermost line of the product. ` in THREAD` follows if it
            was not the main thread that waited. Counted inside `counting`.
        operations: Number of operations by ATen's name, such as `addmm`. Counted inside `counting`.
        launches: Number of operations that launch a kernel: all that are not views. Counted inside `counting`.
        total_bytes: Memory of the device.
        memory_fraction: Part of it that this process may allocate.
        allocated_bytes: Memory of all tensors on the device.
        peak_bytes: Largest `allocated_bytes` so far.
        recording: The graph that is being recorded.
        is_in_backward_thread: Whether a GPU would now run a backward pass in a separate thread.
    """

    total_bytes: int = 80 * 2**30
    memory_fraction: float = 1.0
    waits: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    allocated_bytes: int = 0
    peak_bytes: int = 0
    recording: CUDAGraph | None = None
    is_in_backward_thread: bool = False
    _counts: bool = False
    _backward_error: Exception | None = None
    _storages: set[int] = field(default_factory=set)
    _failures: list[_InjectedFailure] = field(default_factory=list)

    def reset(self) -> None:
        """Set all counts to zero."""
        self.waits.clear()
        self.operations.clear()
        self.launches = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context manager: count waits and operations. Counts add up over several of them until `reset`."""
        before, self._counts = self._counts, True
        try:
            yield
        finally:
            self._counts = before

    @contextmanager
    def memory_limit(self, total_bytes: int) -> Iterator[None]:
        """Context manager: limit the device's memory. An allocation beyond it raises `torch.OutOfMemoryError`."""
        before, self.total_bytes = self.total_bytes, total_bytes
        try:
            yield
        finally:
            self.total_bytes = before

    @contextmanager
    def out_of_memory(self, at: str = "", after: int = 0, times: int = 1) -> Iterator[None]:
        """Context manager: let allocations fail with `torch.OutOfMemoryError`.

        Args:
            at: File that must be on the call stack, such as `distcse/models/cross.py`. Default: any.
            after: Number of matching allocations that succeed before.
            times: Number of allocations that fail; later ones succeed.
        """
        failure = _InjectedFailure(str(ROOT / at), after, times)
        self._failures.append(failure)
        try:
            yield
        finally:
            self._failures.remove(failure)

    def wait(self, kind: str) -> None:
        """Count a wait of the host for the device.

        Raises:
            RuntimeError: A graph is being recorded.
        """
        if self.is_recording():
            self.refuse(RuntimeError(f"operation not permitted when stream is capturing: {kind} @ {_calling_line()}"))
        if self._counts:
            is_main = threading.current_thread() is threading.main_thread()
            thread = "" if is_main else f" in {threading.current_thread().name}"
            self.waits[f"{kind} @ {_calling_line()}{thread}"] += 1

    def count(self, operation: str, is_view: bool) -> None:
        """Count an operation on the device."""
        if self._counts:
            self.operations[operation] += 1
            self.launches += not is_view

    def is_recording(self) -> bool:
        """Return whether this thread's operations are recorded."""
        return self.recording is not None and threading.current_thread() is self.recording.thread

    def refuse(self, error: Exception) -> None:
        """Raise an error; in a backward pass, let the operation run, and raise the error at the end of the pass.

        PyTorch's Python device guard ends the process when an operation raises in a backward pass.
        """
        if not getattr(_local, "backward_passes", 0):
            raise error
        self._backward_error = self._backward_error or error

    @contextmanager
    def backward_pass(self, has_thread: bool) -> Iterator[None]:
        """Context manager: raise at its end what was refused inside.

        Args:
            has_thread: Whether a GPU's backward pass would run in a separate thread.
        """
        _local.backward_passes = getattr(_local, "backward_passes", 0) + 1
        before, self.is_in_backward_thread = self.is_in_backward_thread, has_thread
        try:
            yield
        finally:
            self.is_in_backward_thread = before
            _local.backward_passes -= 1
        error, self._backward_error = self._backward_error, None
        if error is not None:
            raise error

    def allocate(self, raw: Tensor) -> None:
        """Count a tensor's memory until its storage is freed.

        Raises:
            torch.OutOfMemoryError: The memory is exhausted, or a test wants it.
        """
        storage = raw.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not address or address in self._storages:
            return
        if self.allocated_bytes + size > self.total_bytes * self.memory_fraction or self._is_injected():
            free = max(0, self.total_bytes - self.allocated_bytes)
            self.refuse(
                torch.OutOfMemoryError(
                    f"GPU out of memory. Tried to allocate {_format_size(size)}. GPU 0 has a total capacity of "
                    f"{_format_size(self.total_bytes)} of which {_format_size(free)} is free."
                )
            )
        self._storages.add(address)
        self.allocated_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        weakref.finalize(storage, self._free, address, size).atexit = False

    def _free(self, address: int, size: int) -> None:
        self._storages.discard(address)
        self.allocated_bytes -= size

    def _is_injected(self) -> bool:
        for failure in self._failures:
            if failure.times and any(name.startswith(failure.at) for name, _ in _frames()):
                failure.skipped -= 1
                if failure.skipped < 0:
                    failure.times -= 1
                    return True
        return False


def _format_size(size: int) -> str:
    """Format bytes as PyTorch's CUDA allocator does."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


def _frames() -> Iterator[tuple[str, int]]:
    """Yield file and line of the callers, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]


def _calling_line() -> str:
    """Return the innermost line of the product, else of its tests and benchmarks."""
    lines = [(name, line) for name, line in _frames() if name.startswith(_PROJECT) and not name.startswith(_OWN)]
    lines = [found for found in lines if found[0].startswith(_PRODUCT)] or lines
    return f"{Path(lines[0][0]).relative_to(ROOT)}:{lines[0][1]}" if lines else "?"


_local = threading.local()
_active: list[Simulation] = []


def is_active() -> bool:
    """Return whether this process has the simulated GPU now."""
    return bool(_active)


def active() -> Simulation:
    """Return the current simulation.

    Raises:
        RuntimeError: There is none: a tensor has outlived it, or code asks for the device without it.
    """
    if not _active:
        raise RuntimeError("the simulated GPU is used outside of tests.gpusim.simulated()")
    return _active[-1]


@contextmanager
def activated(simulation: Simulation) -> Iterator[None]:
    """Context manager: make a simulation the current one."""
    _active.append(simulation)
    try:
        yield
    finally:
        _active.remove(simulation)


@contextmanager
def device_generator(state: torch.Generator | None = None) -> Iterator[None]:
    """Context manager: draw PyTorch's random numbers from the device's generator, or from a state of it."""
    state = state or GENERATOR.state
    host = torch.default_generator.get_state()
    torch.default_generator.set_state(state.get_state())
    try:
        yield
    finally:
        state.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(host)
