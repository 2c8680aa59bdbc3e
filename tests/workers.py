"""Real worker processes with a gloo group, for tests of what must hold on any number of workers."""

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

# Workers are forked from one server that has imported what all of them need: seconds less for each.
multiprocessing.set_forkserver_preload(["deepspeed", "transformers", "distcse.experiments.distillation.run"])

_WAIT = timedelta(minutes=3)
"""For another worker; one that goes its own way is a failure, not half an hour of waiting."""


def run_workers(function: Callable[..., Any], workers: int, *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` in `workers` processes of one group; their answers, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _worker, args=(function, workers, folder, arguments), nprocs=workers, start_method="forkserver"
        )
        return [torch.load(Path(folder) / f"answer-{rank}", weights_only=False) for rank in range(workers)]


def _worker(rank: int, function: Callable[..., Any], workers: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(workers))
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=workers, timeout=_WAIT)
    answer = function(*arguments)
    torch.save(answer, Path(folder) / f"answer-{rank}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
