"""Dropout as a function of (seed, step, stream), so that it is the same on any worker and after any restart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from distcse.device import is_gpu

_FIXED: ContextVar[bool] = ContextVar("rng is fixed", default=False)


def dropout_seed(seed: int, step: int, stream: int) -> int:
    """Return the dropout seed of one stream at one step."""
    digest = hashlib.blake2b(f"{seed}/{step}/{stream}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


@contextmanager
def dropout_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Context manager: seed PyTorch's generator, and restore its state afterwards."""
    if _FIXED.get():
        yield
        return
    devices, device_type = ([device], device.type) if is_gpu(device) else ([], "cpu")
    with torch.random.fork_rng(devices, device_type=device_type):
        torch.manual_seed(seed)
        yield


def is_recording() -> bool:
    """Return whether the calling code is recorded as a CUDA graph (`rng_is_fixed`)."""
    return _FIXED.get()


@contextmanager
def rng_is_fixed() -> Iterator[None]:
    """Context manager: make `dropout_rng` do nothing, because no seed can be set while a CUDA graph is recorded."""
    token = _FIXED.set(True)
    try:
        yield
    finally:
        _FIXED.reset(token)
