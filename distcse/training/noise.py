"""Dropout noise as a function of (seed, step, stream): the same on any worker and after any restart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_SET: ContextVar[bool] = ContextVar("noise is set", default=False)


def noise_seed(seed: int, step: int, stream: int) -> int:
    """Seed of one stream's dropout noise at one step: the same on any worker and after any restart."""
    digest = hashlib.blake2b(f"{seed}/{step}/{stream}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


@contextmanager
def noise(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers drawn from a seed alone; the state before comes back."""
    if _SET.get():
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def noise_is_set() -> Iterator[None]:
    """Inside, `noise` leaves the random state to who set it: a seed cannot be set while a step is recorded."""
    before = _SET.set(True)
    try:
        yield
    finally:
        _SET.reset(before)
