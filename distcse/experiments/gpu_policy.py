"""Applies `resources.gpu` to this process, which plans, and without Ray also computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distcse import host
from distcse.device import has_gpu
from distcse.errors import ClusterTooSmallError
from distcse.recipe import GpuMode


@contextmanager
def gpu_policy(mode: GpuMode, computes_here: bool) -> Iterator[None]:
    """Context manager: hide the GPUs from this process if the recipe wants none, and refuse a process that lacks a required one.

    Args:
        mode: The recipe's `resources.gpu`.
        computes_here: Whether this process trains, rather than processes of a cluster, whose GPUs are planned there.

    Raises:
        ClusterTooSmallError: `mode` is `required`, and this process must train and sees no GPU.
    """
    if mode == "none":
        with host.gpus_hidden():
            yield
        return
    if mode == "required" and computes_here and not has_gpu():
        raise ClusterTooSmallError(
            "resources.gpu is required, but this process, in which the run trains, sees no GPU; start it on a machine with one "
            "(python -m distcse.doctor shows what torch sees), or write resources.gpu=auto"
        )
    yield
