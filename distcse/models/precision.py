"""The arithmetic of a frozen pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from distcse.device import HALF_PRECISIONS


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """What to enter for `fp32`, or for `bf16` or `fp16` autocast."""
    return torch.autocast(device.type, HALF_PRECISIONS[precision]) if precision in HALF_PRECISIONS else nullcontext()


def held_as(precision: str, device: str) -> torch.dtype:
    """The kind of number that frozen weights are on a device.

    On a GPU that of the products: half the memory, and nothing is cast. On a CPU float32, which `lay_out` brings into the
    kind and order of its kernels.
    """
    return torch.float32 if device == "cpu" else HALF_PRECISIONS.get(precision, torch.float32)
