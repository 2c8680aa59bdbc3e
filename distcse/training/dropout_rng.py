"""Dropout as a function of (seed, step, stream), so that it is the same on any worker and after any restart."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from distcse.devices.device import is_gpu

DrawAs = Callable[[int], AbstractContextManager[None]]
"""Opens a context in which a step that is recorded as a CUDA graph, where no seed can be set, draws with a seed."""


class _Recording(threading.local):
    """This thread's recording in progress; its backward pass is in the same thread."""

    draw_as: DrawAs | None = None


_recording = _Recording()


def dropout_seed(seed: int, step: int, stream: int) -> int:
    """Return the dropout seed of one stream at one step."""
    digest = hashlib.blake2b(f"{seed}/{step}/{stream}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


@contextmanager
def dropout_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Context manager: seed PyTorch's generator, and restore its state afterwards."""
    if _recording.draw_as is not None:
        with _recording.draw_as(seed):
            yield
        return
    devices, device_type = ([device], device.type) if is_gpu(device) else ([], "cpu")
    with torch.random.fork_rng(devices, device_type=device_type):
        torch.manual_seed(seed)
        yield


def is_recording() -> bool:
    """Return whether this thread records a step as a CUDA graph (`recorded_rng`)."""
    return _recording.draw_as is not None


@contextmanager
def recorded_rng(draw_as: DrawAs) -> Iterator[None]:
    """Context manager: let `dropout_rng` draw in the contexts of `draw_as`, in this thread."""
    before, _recording.draw_as = _recording.draw_as, draw_as
    try:
        yield
    finally:
        _recording.draw_as = before
