"""Where models of this process run."""

from __future__ import annotations

import torch


def device_here() -> str:
    """`cuda` where this process sees a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"
