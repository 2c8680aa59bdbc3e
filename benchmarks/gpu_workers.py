"""Steps of two workers that share one GPU: recorded in parts between their collectives, against eager ones.

    python -m benchmarks.gpu_workers                        on one GPU; gloo sends the collectives through the host
    python -m benchmarks.gpu_workers --device sim --tiny    whether it works, on simulated GPUs; no figure counts

RankCSE's loss on random lists, BERT-base in bf16, 64 sentences per worker. Eight steps of each way have to have the same losses;
interleaved blocks of both ways are then timed. It says that a recording in parts is right and what it saves on a device,
and nothing of NCCL or of GPUs that are connected. Needs what `benchmarks.gpu` needs. Exit status 2: no GPU here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from benchmarks.gpu import RANKCSE, Bench, Student, entered, equal_steps, require_device
from distcse.devices.device import default_device

WORKERS = 2
ROUNDS, STEPS = 7, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("gpu", "sim"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="two layers, two rounds: shows that the code works")
    options = parser.parse_args()
    require_device(parser, options.device, options.tiny)
    with TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(  # type: ignore[attr-defined]
            work, args=(folder, options.device, options.tiny), nprocs=WORKERS, start_method="spawn"
        )


def work(rank: int, folder: str, device: str, tiny: bool) -> None:
    """Be a worker; the first one prints what was found."""
    dist.init_process_group("gloo", init_method=f"file://{Path(folder)}/group", rank=rank, world_size=WORKERS)
    with entered(device):
        compare(Bench(torch.device(default_device()), tiny), rank)
    dist.destroy_process_group()


def compare(bench: Bench, rank: int) -> None:
    """Check that both ways learn the same, and time them one after the other."""
    rows = bench.n // WORKERS
    ways = {
        name: Student(bench, "base", RANKCSE, "bf16", rows, graphs=name == "recorded") for name in ("recorded", "eager")
    }
    torch.manual_seed(rank)
    batches = [bench.batch(rows) for _ in range(8)]
    lists = torch.rand(8 * rows, bench.n, device=bench.device)
    for way in ways.values():
        way.batches, way.teacher_lists = batches, lists.__getitem__
    equal_steps(ways["recorded"], ways["eager"], f"worker {rank}: steps recorded in parts")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(2 if bench.tiny else ROUNDS):
        for name, way in ways.items():
            dist.barrier()
            seconds[name].append(seconds_of(bench, way, 2 if bench.tiny else STEPS))
    if rank == 0:
        medians = {name: 1000 * statistics.median(found) for name, found in seconds.items()}
        ratio = statistics.median(eager / recorded for recorded, eager in zip(*seconds.values(), strict=True))
        parts = ", ".join(f"{name} {median:.1f} ms" for name, median in medians.items())
        print(f"{WORKERS} workers of {rows} sentences: {parts} a step, eager / recorded {ratio:.2f}", flush=True)


def seconds_of(bench: Bench, way: Student, steps: int) -> float:
    """Return the seconds of a step."""
    begun = time.perf_counter()
    for _ in range(steps):
        way()
    assert bench.module is not None
    bench.module.synchronize()
    return (time.perf_counter() - begun) / steps


if __name__ == "__main__":
    main()
