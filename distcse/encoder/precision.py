"""The arithmetic of a frozen pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """What to enter for `fp32`, or for `bf16` or `fp16` autocast."""
    return torch.autocast(device.type, _HALF[precision]) if precision in _HALF else nullcontext()
