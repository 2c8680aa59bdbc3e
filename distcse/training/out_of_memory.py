"""Turns PyTorch's out-of-memory error in a training step into one message with the numbers and the ways out."""

from __future__ import annotations

import re
import traceback
from types import TracebackType

import torch

from distcse.devices.device import gpu_module, is_gpu
from distcse.devices.distributed import world_size
from distcse.errors import OutOfMemoryError
from distcse.recipe import LoopSection, TrainingSection
from distcse.recipe.training import MAX_RECORDED_STREAMS

_GIB = 2.0**30


class OutOfMemoryAdvice:
    """Context manager, for any number of uses: turns PyTorch's error of exhausted memory into `OutOfMemoryError`.

    Args:
        device: Device of the training.
        section: The recipe's training section.
        key: Its recipe key.
        is_recorded: Whether steps are recorded as CUDA graphs. Default: False.

    Raises:
        OutOfMemoryError: The block exhausted the device's memory. The same values would exhaust it again.
    """

    def __init__(self, device: torch.device | str, section: LoopSection, key: str, is_recorded: bool = False) -> None:
        self._device = device
        self._is_recorded = is_recorded
        self._section = section
        self._key = key

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, torch.OutOfMemoryError):
            return
        section, rows = self._section, self._section.batch_size // world_size()
        problem = f"{_describe_memory(self._device)}: {_describe_error(error)}"
        traceback.clear_frames(trace)  # its frames would keep the step's tensors alive
        raise OutOfMemoryError(
            f"a training step ran out of memory with {rows} of {section.batch_size} rows on this worker in "
            f"{section.precision}, on {problem}. {_describe_fixes(section, self._key, rows, self._is_recorded)}"
        ) from None


def _describe_memory(device: torch.device | str) -> str:
    """Describe a GPU's memory at the moment: total, free, allocated."""
    if not is_gpu(device):
        return "the CPU"
    module = gpu_module(device)
    free, total = module.mem_get_info(device)
    allocated, reserved = module.memory_allocated(device), module.memory_reserved(device)
    return (
        f"{module.get_device_name(device)} ({total / _GIB:.1f} GiB, {free / _GIB:.1f} free; this process has "
        f"{allocated / _GIB:.1f} allocated and {(reserved - allocated) / _GIB:.1f} cached)"
    )


def _describe_error(error: torch.OutOfMemoryError) -> str:
    """Return what PyTorch's message says of the failed allocation, and of the memory that the process may use."""
    text = " ".join(str(error).split())
    requested = re.search(r"[Tt]ried to allocate [\d.]+ \w+", text)
    allowed = re.search(r"([\d.]+ \w+) allowed", text)
    limit = f"; this process may use {allowed[1]} of it, by its part of the GPU" if allowed else ""
    return (requested[0] if requested else text) + limit


def _describe_fixes(section: LoopSection, key: str, rows: int, is_recorded: bool) -> str:
    """List the ways out: those that a resumed run can take, and those that need a new run."""
    new_run = [f"{key}.batch_size={max(2, section.batch_size // 2)}"]
    if section.precision == "fp32":
        new_run.append(f"{key}.precision=bf16")
    begin_again = f"start a new run with {' or '.join(new_run)}, or with a smaller max_length"
    if not isinstance(section, TrainingSection):
        return f"Write more workers for the group, and start a new run; or {begin_again}"
    chunk = _largest_divisor(rows, below=min(rows, section.grad_cache_chunk or rows))
    resumed = [f"training.grad_cache_chunk={chunk} (the same gradient, one more forward pass)"] if chunk else []
    if chunk and section.cuda_graphs == "on" and rows > chunk * MAX_RECORDED_STREAMS:
        resumed[0] = f"training.cuda_graphs=off {resumed[0]}"
    if chunk and section.dropout_rng_streams is not None:
        resumed[0] = f"training.dropout_rng_streams=null {resumed[0]}"
    workers = max(1, section.workers) * 2
    if section.batch_size % workers == 0 and not section.grad_cache_chunk:
        resumed.append(f"training.workers={workers}")
    if is_recorded:
        resumed.append("training.cuda_graphs=off (recorded steps keep their memory)")
    if not resumed:
        return f"The last checkpoint is kept; {begin_again}"
    return f"The last checkpoint is kept: continue it with --resume and {' or '.join(resumed)}; or {begin_again}"


def _largest_divisor(number: int, below: int) -> int | None:
    """Return the largest divisor of a number that is at most half of `below`; None if `below` is 1."""
    return next((divisor for divisor in range(below // 2, 0, -1) if number % divisor == 0), None)
