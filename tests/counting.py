"""Counters of what runs, for figures that are exact: numbers read from tensors, tensors' sizes, tokens through models."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from distcse.models import CrossEncoder, Encoder
from distcse.storage.checksums import checksum
from distcse.teachers.lists import TeacherClient

_SHARD = re.compile(r"shard-\d+\.npy")


@contextmanager
def shard_checksums() -> Iterator[list[str]]:
    """Context manager: the names of the shards whose checksum this process computes, in the order of the computations."""
    names: list[str] = []
    is_on = True

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if is_on and event == "open" and sys._getframe(1).f_code is checksum.__code__:
            names.extend(_SHARD.findall(Path(arguments[0]).name))

    sys.addaudithook(note)
    try:
        yield names
    finally:
        is_on = False  # a hook cannot be removed


class NumbersRead(TorchDispatchMode):
    """Numbers that Python reads from tensors: on a GPU each makes the host wait for the device."""

    _READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self._READS:
            self.count += 1
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def dispatched(call: Callable[[], object]) -> int:
    """Operations that a call hands to PyTorch."""
    with profile() as seen:
        call()
    return sum(event.count for event in seen.key_averages() if event.key.startswith("aten::"))


class LargestTensor(TorchDispatchMode):
    """Numbers in the largest tensor that an operation made, inputs apart."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for made in found if isinstance(found, tuple | list) else [found]:
            if isinstance(made, torch.Tensor):
                self.numbers = max(self.numbers, made.untyped_storage().nbytes() // made.element_size())
        return found


@dataclass
class Passes:
    """What went through a model."""

    calls: int = 0
    rows: int = 0
    real: int = 0
    """Tokens."""
    processed: int = 0
    """Tokens and padding."""

    @property
    def filled(self) -> float:
        """Share of the processed tokens that are real."""
        return self.real / self.processed


@contextmanager
def passes_of(encoder: nn.Module | None = None) -> Iterator[Passes]:
    """Count what goes through an encoder of distcse, whose forward takes ids and mask; through all of them for None."""
    seen = Passes()

    def note(module: nn.Module, inputs: Sequence[Any]) -> None:
        if module is encoder or (encoder is None and isinstance(module, Encoder | CrossEncoder)):
            mask = inputs[1]
            seen.calls += 1
            seen.rows += len(mask)
            seen.real += int(mask.sum())
            seen.processed += mask.numel()

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield seen
    finally:
        hook.remove()


class CountedSource:
    """A `TeacherClient` that counts what is asked of it: each request is one remote call where the teacher is an actor."""

    def __init__(self, source: TeacherClient) -> None:
        self._source = source
        self.requests: list[int] = []
        """Steps of each block."""

    def request(self, columns: NDArray[np.int64], rows: slice) -> Future[NDArray[np.float32]]:
        self.requests.append(len(columns))
        return self._source.request(columns, rows)


def counted_calls(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """A function, and a list that grows by 1 a call."""
    calls: list[int] = []

    def counting(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return function(*arguments, **named)

    return counting, calls


def with_padding(ids: Sequence[Sequence[int]], batches: Sequence[Sequence[int]]) -> int:
    """Tokens that batches of texts, by their places, are once each is padded to its longest."""
    return sum(len(batch) * max(len(ids[place]) for place in batch) for batch in batches)
