"""Trials that request lists from one pool of servers as fast as possible: latencies, the longest queue, memory over time.

    python -m benchmarks.load --cache FOLDER      # a million rows, four teachers, eight trials, 10,000 requests and more
    python -m benchmarks.load --rows 20000 --requests 400 --cache FOLDER

The load test is that of `tests/load.py`. Exits with status 1 if an answer is wrong, a queue is longer than two blocks per
trial, or memory grows.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.protocol import machine
from distcse.cluster.cluster import cluster
from distcse.storage import write_text_atomic
from tests.load import TOLERANCE, Load, LoadResult, run_load
from tests.memory import MIB

LEAK_SHARE, LEAK_BYTES = 0.01, 2 * MIB
"""Memory is constant if the second half gains less than this share of its answers' bytes, or less than these bytes."""


def answer_bytes(load: Load) -> int:
    """Return the bytes of the lists of one block."""
    return load.block_steps * load.batch**2 * np.dtype(np.float32).itemsize


def allowed_growth(result: LoadResult, name: str) -> float:
    """Return the bytes that a process or the object store may gain in the second half."""
    servers = result.load.teachers * result.load.servers
    among = servers if name.startswith("server") else result.load.trials if name.startswith("trial") else 1
    passed = answer_bytes(result.load) * len(result.latencies) / among
    return max(LEAK_BYTES, LEAK_SHARE * passed / 2)


def problems(result: LoadResult) -> list[str]:
    """Return a line for each promise that does not hold.

    Not checked: shared pages, which belong to the object store, and Ray's GCS, which stores events of the last 100,000 tasks.
    """
    bound, largest = 2 * result.load.trials, max(trial.largest_difference for trial in result.trials)
    found = [
        f"{name}, {kind} grew by {series.growth() / MIB:.1f} MiB in the second half"
        for name, kinds in result.memory.items()
        for kind, series in kinds.items()
        if name != "gcs_server" and kind != "shared" and series.growth() > allowed_growth(result, name)
    ]
    if largest > TOLERANCE:
        found.append(f"a list differs by {largest:.1e} from the table's cosines (at most {TOLERANCE:.0e})")
    if result.deepest_of_a_teacher > bound:
        found.append(f"a teacher had {result.deepest_of_a_teacher} unanswered requests (at most {bound})")
    return found


def report_of(result: LoadResult) -> dict[str, Any]:
    """Return all figures."""
    latencies, waited = result.latencies, sum(trial.wait_s for trial in result.trials)
    return {
        "load": asdict(result.load),
        "requests": len(latencies),
        "answers MiB": round(len(latencies) * answer_bytes(result.load) / MIB),
        "seconds": round(result.seconds, 1),
        "requests a second": round(len(latencies) / result.seconds, 1),
        "latency ms": {
            **{f"p{q}": round(1000 * float(np.percentile(latencies, q)), 1) for q in (50, 90, 99)},
            "largest": round(1000 * float(latencies.max()), 1),
        },
        "waited share": round(waited / (result.seconds * result.load.trials), 3),
        "most unanswered": {
            "of a trial at a teacher": result.deepest_of_a_trial,
            "at a teacher": result.deepest_of_a_teacher,
        },
        "lists compared": sum(trial.compared for trial in result.trials),
        "largest difference": max(trial.largest_difference for trial in result.trials),
        "problems": problems(result),
        "memory": {
            name: {kind: series.report() for kind, series in kinds.items()} for name, kinds in result.memory.items()
        },
    }


def lines_of(found: dict[str, Any]) -> list[str]:
    """Return the lines of a printed report."""
    load, latency, most = found["load"], found["latency ms"], found["most unanswered"]
    lines = [
        f"{load['rows']:,} rows of {load['width']}, {load['teachers']} teachers, {load['servers']} server(s) each, "
        f"{load['trials']} trials, blocks of {load['block_steps']} steps of {load['batch']} rows",
        f"{found['requests']:,} requests in {found['seconds']:.0f} s, {found['requests a second']:.0f} a second, "
        f"{found['answers MiB']:,} MiB of answers",
        "latency " + ", ".join(f"{name} {value:.0f} ms" for name, value in latency.items()),
        f"unanswered at most: {most['of a trial at a teacher']} of a trial at a teacher, {most['at a teacher']} at a teacher",
        f"{found['lists compared']:,} lists compared, largest difference {found['largest difference']:.1e}",
        f"{'memory, MiB':<28}{'largest':>10}{'gain of the second half':>28}",
    ]
    lines += [
        f"  {f'{name}, {kind}':<26}{course['largest MiB']:>10.1f}{course['gain MiB']:>28.2f}"
        for name, kinds in found["memory"].items()
        for kind, course in kinds.items()
    ]
    return [*lines, *(f"PROBLEM: {problem}" for problem in found["problems"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder of the tables; 3 GB at full size")
    parser.add_argument("--rows", type=int, default=Load.rows)
    parser.add_argument("--requests", type=int, default=Load.requests)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    with cluster():
        result = run_load(Load(rows=options.rows, requests=options.requests), options.cache.resolve())
    report = {"machine": machine(), **report_of(result)}
    print("\n".join(lines_of(report)))
    write_text_atomic(options.out, json.dumps(report, indent=1) + "\n")
    print(f"written: {options.out}")
    sys.exit(1 if report["problems"] else 0)


if __name__ == "__main__":
    main()
