"""The collectives that the training loop needs. Without a process group there is one worker, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from distcse.errors import DistcseError

T = TypeVar("T")


def world_size() -> int:
    """Number of workers that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This worker's rank, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def broadcast(value: T) -> T:
    """Rank 0's value on every rank: a decision must not differ by a rounding."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on every rank.

    An error of ours is raised on every rank: raised on rank 0 alone, it would leave the others waiting forever.
    """
    result: T | DistcseError | None = None
    if rank() == 0:
        try:
            result = work()
        except DistcseError as error:
            result = error
    result = broadcast(result)
    if isinstance(result, DistcseError):
        raise result
    return cast(T, result)


def on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work` on every rank and return each rank's own result.

    An error of ours on any rank is raised on every rank: raised on one alone, it would leave the others waiting forever.
    """
    result: T | None = None
    error: DistcseError | None = None
    try:
        result = work()
    except DistcseError as raised:
        error = raised
    if world_size() > 1:
        errors: list[DistcseError | None] = [None] * world_size()
        dist.all_gather_object(errors, error)
        error = next((raised for raised in errors if raised is not None), None)
    if error is not None:
        raise error
    return cast(T, result)


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over all workers, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_max(value: int, device: torch.device) -> int:
    """Largest of all workers' values; `device` is where the backend takes tensors from."""
    if world_size() == 1:
        return value
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def barrier() -> None:
    """Wait until every worker has called it."""
    if world_size() > 1:
        dist.barrier()
