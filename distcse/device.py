"""Where models of this process run, and how numbers get there."""

from __future__ import annotations

import torch
from torch import Tensor


def device_here() -> str:
    """`cuda` where this process sees a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def sent(numbers: Tensor, device: torch.device | str) -> Tensor:
    """The same on a device; on its way to a GPU the host goes on meanwhile.

    A plain copy of the host's memory makes the host wait for all that the GPU was told to do before. Of a page-locked one it
    does not, and PyTorch keeps that memory until the copy is through.
    """
    if torch.device(device).type != "cuda" or numbers.device.type != "cpu":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
