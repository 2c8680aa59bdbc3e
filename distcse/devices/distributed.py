"""Collective operations over the training workers. Without a process group, there is one worker and they do nothing.

A training step calls these functions and none of `torch.distributed`: collectives of tensors run between the parts of a step that
is recorded as CUDA graphs (`collectives_by`), and are in no graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from distcse.errors import DistcseError

T = TypeVar("T")
RunCollective = Callable[[Callable[[], object], int], None]
"""Runs a collective, now, later or not at all; the second argument is the number of values that it sends."""


class _Running(threading.local):
    """How this thread runs collectives; the backward pass of a recorded step is in the thread that records it."""

    by: RunCollective | None = None


_running = _Running()


@contextmanager
def collectives_by(run: RunCollective) -> Iterator[None]:
    """Context manager: let `run` decide when collectives of tensors run that this thread calls."""
    before, _running.by = _running.by, run
    try:
        yield
    finally:
        _running.by = before


def _run(collective: Callable[[], object], tensor: Tensor) -> None:
    if _running.by is None:
        collective()
    else:
        _running.by(collective, tensor.numel())


def world_size() -> int:
    """Return the number of training workers."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this worker's rank, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def broadcast(value: T) -> T:
    """Return rank 0's value on every rank, so that rounding cannot make ranks decide differently."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on every rank.

    Raises:
        DistcseError: `work` raised it. It is raised on every rank, because the others would otherwise wait forever.
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

    Raises:
        DistcseError: `work` raised it on a rank. It is raised on every rank, because others would otherwise wait forever.
    """
    result: T | None = None
    error: DistcseError | None = None
    try:
        result = work()
    except DistcseError as raised:
        error = raised
    error = next((raised for raised in gather_objects(error) if raised is not None), None)
    if error is not None:
        raise error
    return cast(T, result)


def gather_objects(value: T) -> list[T]:
    """Return every rank's value, in the order of ranks."""
    if world_size() == 1:
        return [value]
    values = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


def all_gather_parts(part: Tensor) -> list[Tensor]:
    """Gather a tensor of every worker, in the order of their ranks, without gradient.

    `all_gather_into_tensor` would copy less, but gloo, which connects workers that share a GPU, does not have it for a GPU's
    tensors.
    """
    if world_size() == 1:
        return [part]
    sent = part.contiguous()
    # Numbers where the collective may not run.
    parts = [torch.empty_like(sent) if _running.by is None else sent.clone() for _ in range(world_size())]
    _run(lambda: dist.all_gather(parts, sent), sent)
    return parts


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over all workers, in place."""
    if world_size() > 1:
        _run(lambda: dist.all_reduce(tensor), tensor)
    return tensor


def all_reduce_max(tensor: Tensor) -> Tensor:
    """Replace a tensor's elements by the largest ones of all workers; return the tensor."""
    if world_size() > 1:
        _run(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX), tensor)
    return tensor


def barrier() -> None:
    """Wait until every worker has called this function."""
    if world_size() > 1:
        dist.barrier()
