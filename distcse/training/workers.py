"""The few collectives the loop needs; without a process group there is one worker and nothing is sent."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def world_size() -> int:
    """Workers that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this worker, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def from_first(value: T) -> T:
    """The first worker's value, on all workers: decisions must not differ by a rounding."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def add_over_workers(tensor: Tensor) -> Tensor:
    """Sum over all workers, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def wait_for_all() -> None:
    """Return when every worker got here."""
    if world_size() > 1:
        dist.barrier()
