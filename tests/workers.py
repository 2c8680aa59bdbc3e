"""Real worker processes with a gloo process group, for tests with several workers."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Workers are forked from a server that has imported the libraries, which saves seconds per worker.
multiprocessing.set_forkserver_preload(["deepspeed", "transformers", "distcse.runs.distillation.experiment"])

_TIMEOUT = timedelta(minutes=3)
"""Timeout of collectives, so that a worker which skips one fails the test soon instead of after half an hour."""


def run_workers(function: Callable[..., Any], workers: int, *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` in `workers` processes of one group, and return their results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(  # type: ignore[attr-defined]
            _worker, args=(function, workers, folder, arguments), nprocs=workers, start_method="forkserver"
        )
        return [torch.load(Path(folder) / f"answer-{rank}", weights_only=False) for rank in range(workers)]


def _worker(rank: int, function: Callable[..., Any], workers: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(workers))
    os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = "0"  # as if mpirun had started this test
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=workers, timeout=_TIMEOUT
    )
    answer = function(*arguments)
    torch.save(answer, Path(folder) / f"answer-{rank}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
