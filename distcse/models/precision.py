"""Precision of forward passes: autocast, and the data type of frozen weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from distcse.device import HALF_PRECISIONS


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Return a context: autocast for `bf16` or `fp16`, nothing for `fp32`."""
    return torch.autocast(device.type, HALF_PRECISIONS[precision]) if precision in HALF_PRECISIONS else nullcontext()


def frozen_weight_dtype(precision: str, device: str) -> torch.dtype:
    """Return the data type in which frozen weights are loaded.

    On a GPU it is the precision of the forward passes: half the memory, and no casts. On a CPU it is float32, which
    `use_mkldnn_linear` converts.
    """
    return torch.float32 if device == "cpu" else HALF_PRECISIONS.get(precision, torch.float32)
