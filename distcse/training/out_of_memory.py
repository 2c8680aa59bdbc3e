"""Turns PyTorch's out-of-memory error in a training step, which has the numbers, into one message with the ways out."""

from __future__ import annotations

import traceback
from types import TracebackType

import torch

from distcse.devices.distributed import world_size
from distcse.errors import OutOfMemoryError
from distcse.recipe import LoopSection, TrainingSection
from distcse.recipe.training import MAX_RECORDED_STREAMS


class OutOfMemoryAdvice:
    """Context manager, for any number of uses: turns PyTorch's error of exhausted memory into `OutOfMemoryError`."""

    def __init__(self, section: LoopSection, key: str, is_recorded: bool = False) -> None:
        self._section, self._key, self._is_recorded = section, key, is_recorded

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, torch.OutOfMemoryError):
            return
        section, rows = self._section, self._section.batch_size // world_size()
        problem = " ".join(str(error).split()).partition(" If reserved")[
            0
        ]  # PyTorch's advice on its own settings follows
        traceback.clear_frames(trace)  # its frames would keep the step's tensors alive
        raise OutOfMemoryError(
            f"a training step ran out of memory with {rows} of {section.batch_size} rows on this worker in "
            f"{section.precision}: {problem} {_describe_fixes(section, self._key, rows, self._is_recorded)}"
        ) from None


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
