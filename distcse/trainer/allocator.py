"""glibc's allocator in processes that train: fast while they do, modest when they do not."""

from __future__ import annotations

import ctypes
import gc
import sys

FAST = {
    # glibc hands large blocks back to the kernel after every step and faults them in again: up to 5 times the step.
    "MALLOC_MMAP_THRESHOLD_": "2147483648",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
}
"""Environment variables of a process that trains; read when it starts."""


def release_memory() -> None:
    """Hand what is free to the kernel and the GPU: after a training, in a process that goes on to another.

    With `FAST` nothing is given back by itself, and every training leaves holes of other sizes than the next one needs. A GPU's
    memory PyTorch keeps for itself, and another process of the same GPU may be next to want it.
    """
    gc.collect()
    trim()
    torch = sys.modules.get("torch")  # who has no need of it does not import it for this
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def trim() -> None:
    """Hand free memory to the kernel where nothing is left that Python would have to find first."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)
