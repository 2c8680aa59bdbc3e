"""Settings of glibc's allocator for training processes: fast during training, with memory returned afterwards."""

from __future__ import annotations

import ctypes
import gc
import sys

MALLOC_ENV = {
    # By default glibc returns large blocks to the kernel after every step and faults them in again: steps are up to 5x slower.
    "MALLOC_MMAP_THRESHOLD_": "2147483648",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
}
"""Environment variables of a training process; glibc reads them when the process starts."""


def release_memory() -> None:
    """Return free memory to the kernel and the GPU. Call it between two trainings in one process.

    With `MALLOC_ENV`, glibc returns no memory by itself, and each training fragments the heap further. PyTorch caches GPU
    memory, which another process on the same GPU may need.
    """
    gc.collect()
    trim()
    torch = sys.modules.get("torch")  # not imported only for this
    if torch is not None and torch.accelerator.is_available():
        module = torch.get_device_module()
        if module.is_initialized():  # a process that has not used its GPU gets no context for this
            module.empty_cache()


def trim() -> None:
    """Return free memory to the kernel, without a garbage collection."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if malloc_trim is not None:
        malloc_trim(0)
