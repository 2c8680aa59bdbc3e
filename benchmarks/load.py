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
from pathlib import Path
from typing import Any

from benchmarks.protocol import machine
from distcse.cluster.cluster import cluster
from distcse.storage import write_text_atomic
from tests.load import Load, run_load


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
    report = {"machine": machine(), **result.report()}
    print("\n".join(lines_of(report)))
    write_text_atomic(options.out, json.dumps(report, indent=1) + "\n")
    print(f"written: {options.out}")
    sys.exit(1 if report["problems"] else 0)


if __name__ == "__main__":
    main()
