"""Dropout as a function of (seed, step, stream), so that it is the same on any worker and after any restart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from distcse.device import is_gpu


class RecordedRNG(Protocol):
    """Random numbers of a step that is recorded as a CUDA graph, where no seed can be set."""

    def drawing(self, seed: int) -> AbstractContextManager[None]:
        """Context manager: draw inside what a replay draws with the seed that takes this one's place."""
        ...


_recorded: RecordedRNG | None = None
"""The recording in progress. Not a context variable: autograd recomputes activations in other threads."""


def dropout_seed(seed: int, step: int, stream: int) -> int:
    """Return the dropout seed of one stream at one step."""
    digest = hashlib.blake2b(f"{seed}/{step}/{stream}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


@contextmanager
def dropout_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Context manager: seed PyTorch's generator, and restore its state afterwards."""
    if _recorded is not None:
        with _recorded.drawing(seed):
            yield
        return
    devices, device_type = ([device], device.type) if is_gpu(device) else ([], "cpu")
    with torch.random.fork_rng(devices, device_type=device_type):
        torch.manual_seed(seed)
        yield


def is_recording() -> bool:
    """Return whether a step is recorded as a CUDA graph (`recorded_rng`)."""
    return _recorded is not None


@contextmanager
def recorded_rng(rng: RecordedRNG) -> Iterator[None]:
    """Context manager: let `dropout_rng` draw from `rng`, in all threads."""
    global _recorded
    before, _recorded = _recorded, rng
    try:
        yield
    finally:
        _recorded = before
