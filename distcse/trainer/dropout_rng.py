"""Dropout drawn from (seed, step, stream): the same on any worker and after any restart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_FIXED: ContextVar[bool] = ContextVar("rng is fixed", default=False)


def dropout_seed(seed: int, step: int, stream: int) -> int:
    """Seed of one stream's dropout at one step."""
    digest = hashlib.blake2b(f"{seed}/{step}/{stream}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


@contextmanager
def dropout_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a seed inside; the generator's state is restored afterwards."""
    if _FIXED.get():
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def rng_is_fixed() -> Iterator[None]:
    """Make `dropout_rng` keep the current generator inside: no seed can be set while a CUDA graph is recorded."""
    before = _FIXED.set(True)
    try:
        yield
    finally:
        _FIXED.reset(before)
