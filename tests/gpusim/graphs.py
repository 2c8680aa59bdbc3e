"""CUDA graphs: a recording is a tape of operations. It runs none that lasts, and replays without Python above ATen."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.gpusim.simulation import GENERATOR, Generator, active, device_generator

_OVERWRITTEN = ("running_mean", "running_var")
"""Arguments that batch norm overwrites, although its schema does not say so."""


class _Operation(NamedTuple):
    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: list[Tensor]
    state: torch.Generator | None
    """The random state that it draws from."""


class CUDAGraph:
    """Records operations on the CPU tensors that hold the device's numbers.

    Recording computes them too, because the outputs' shapes and strides must be known, and then restores what they have
    changed: recording on a GPU computes nothing.
    """

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self._tape: list[_Operation] = []
        self._outputs: list[Tensor] = []  # kept, so that no address is used again
        self._created: set[int] = set()
        self._overwritten: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._states: list[torch.Generator] = []

    def register_generator_state(self, generator: Generator) -> None:
        """Let the recording draw from a generator's state; it may also draw from the state that is set when it begins."""
        self._states.append(generator.state)

    def before(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Save what an operation will overwrite.

        Raises:
            RuntimeError: It is a collective: workers record at different steps, and would wait for each other.
        """
        if function.namespace == "c10d":
            active().refuse(RuntimeError("a collective cannot be recorded"))
        named = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | dict(kwargs)
        for argument in function._schema.arguments:
            if argument.is_write or argument.name in _OVERWRITTEN:
                for tensor in _tensors(named.get(argument.name)):
                    storage = tensor.untyped_storage()
                    address = storage.data_ptr()
                    if address and address not in self._created and address not in self._overwritten:
                        self._overwritten[address] = (storage, storage.clone())

    def after(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record an operation and its result."""
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        known = {id(tensor) for tensor in inputs}
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs} - {0}
        new = [tensor for tensor in outputs if id(tensor) not in known]
        addresses = [tensor.untyped_storage().data_ptr() for tensor in new]
        self._outputs.extend(new)
        self._created.update(set(addresses) - storages - {0} - self._overwritten.keys())
        is_view = bool(new) and not function._schema.is_mutable and all(address in storages for address in addresses)
        if not is_view:
            self._tape.append(_Operation(function, args, kwargs, outputs, self._state_of(function)))

    def _state_of(self, function: Any) -> torch.Generator | None:
        """Return the random state that an operation draws from.

        Raises:
            RuntimeError: The graph does not know it.
        """
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return None
        if not any(state is GENERATOR.state for state in self._states):
            active().refuse(RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode."))
        return GENERATOR.state

    def restore(self) -> None:
        """Restore what the recording has overwritten."""
        for storage, saved in self._overwritten.values():
            storage.copy_(saved)
        self._overwritten.clear()

    def replay(self) -> None:
        """Run the recorded operations again, on the tensors that they were recorded with."""
        active().count("graph", is_view=False)
        for function, args, kwargs, outputs, state in self._tape:
            for old, new in zip(outputs, _tensors(compute(function, args, kwargs, state)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextmanager
def graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Record this thread's operations, as `torch.cuda.graph` does."""
    simulation = active()
    cuda_graph.thread = threading.current_thread()
    cuda_graph.register_generator_state(GENERATOR)
    simulation.recording = cuda_graph
    try:
        yield
    finally:
        simulation.recording = None
        cuda_graph.restore()
    if threading.current_thread() is not cuda_graph.thread or simulation.is_in_backward_thread:
        simulation.refuse(RuntimeError("attempt to terminate a thread-local capture sequence from another thread"))


def compute(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], state: torch.Generator | None = None) -> Any:
    """Run an operation on CPU tensors, with random numbers of the device, or from a state of its generator."""
    if torch.Tag.nondeterministic_seeded in function.tags:
        with device_generator(state):
            return function(*args, **kwargs)
    return function(*args, **kwargs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
