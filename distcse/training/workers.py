"""The few collectives the loop needs; without a process group there is one worker and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from distcse.errors import DistcseError

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


def by_first(work: Callable[[], T]) -> T:
    """What work of the first worker alone comes to, on all workers; its mistake is raised by all of them, at this place.

    The others would wait for the first one for ever, were it raised there alone.
    """
    came: T | DistcseError | None = None
    if rank() == 0:
        try:
            came = work()
        except DistcseError as mistake:
            came = mistake
    came = from_first(came)
    if isinstance(came, DistcseError):
        raise came
    return cast(T, came)


def by_all(work: Callable[[], T]) -> T:
    """What work that every worker does for itself comes to; the mistake of any is raised by all of them, at this place.

    The others would wait for that one for ever, were it raised there alone.
    """
    came: T | None = None
    mistake: DistcseError | None = None
    try:
        came = work()
    except DistcseError as met:
        mistake = met
    if world_size() > 1:
        told: list[DistcseError | None] = [None] * world_size()
        dist.all_gather_object(told, mistake)
        mistake = next((met for met in told if met is not None), None)
    if mistake is not None:
        raise mistake
    return cast(T, came)


def add_over_workers(tensor: Tensor) -> Tensor:
    """Sum over all workers, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def wait_for_all() -> None:
    """Return when every worker got here."""
    if world_size() > 1:
        dist.barrier()
