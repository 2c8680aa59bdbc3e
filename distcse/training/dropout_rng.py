"""Dropout as a function of (seed, step, stream), so that it is the same on any worker and after any restart."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from distcse.devices.device import is_gpu

DrawAs = Callable[[int], AbstractContextManager[None]]
"""Opens a context in which a step that is recorded as a CUDA graph, where no seed can be set, draws with a seed."""
_draw_as: DrawAs | None = None
"""That of the recording in progress. Not a context variable: autograd recomputes activations in other threads."""


def dropout_seed(seed: int, step: int, stream: int) -> int:
    """Return the dropout seed of one stream at one step."""
    digest = hashlib.blake2b(f"{seed}/{step}/{stream}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


@contextmanager
def dropout_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Context manager: seed PyTorch's generator, and restore its state afterwards."""
    if _draw_as is not None:
        with _draw_as(seed):
            yield
        return
    devices, device_type = ([device], device.type) if is_gpu(device) else ([], "cpu")
    with torch.random.fork_rng(devices, device_type=device_type):
        torch.manual_seed(seed)
        yield


def is_recording() -> bool:
    """Return whether a step is recorded as a CUDA graph (`recorded_rng`)."""
    return _draw_as is not None


@contextmanager
def recorded_rng(draw_as: DrawAs) -> Iterator[None]:
    """Context manager: let `dropout_rng` draw in the contexts of `draw_as`, in all threads."""
    global _draw_as
    before, _draw_as = _draw_as, draw_as
    try:
        yield
    finally:
        _draw_as = before
