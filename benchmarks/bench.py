"""Measure all rows that a CPU can measure, one process per script; then list what moved and rewrite the table.

    make bench                      or: python -m benchmarks.bench --data ../shared/data
    python -m benchmarks.bench --quick    every script at its smallest: shows that they work, stores nothing

Single-core scripts run concurrently on one core each if there are two cores; the others have the machine to themselves. A
script that fails keeps its stored report; the others continue, and the exit status is 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path

from benchmarks.options import Options, parsed
from benchmarks.protocol import Report, moved, read_reports
from benchmarks.table import write_readme

LANES = (("step", "rank_encoder", "loops"), ("pairs", "parts", "teachers"))
"""Single-core scripts; those of one lane run one after the other."""
ALONE = ("orchestration", "scale")


def main() -> None:
    options = parsed(__doc__)
    stored = {(report.place, report.group): report for report in read_reports(options.out)}
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        failed = _all_scripts(options, Path(folder))
        if not options.quick:
            for report in read_reports(Path(folder)):
                lines += what_moved(report, stored.get((report.place, report.group)))
                report.write(options.out)
    if not options.quick:
        write_readme(read_reports(options.out))
        print("what moved by more than its spread:", *(lines or ["nothing"]), sep="\n  ")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; their stored figures stay as they were")


def _all_scripts(options: Options, out: Path) -> list[str]:
    """Names of those that failed; reports of the others are in `out`."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with ThreadPoolExecutor(len(LANES) if len(cores) >= len(LANES) else 1) as pool:
        failed = list(pool.map(_one_after_the_other, LANES, repeat(options), repeat(out), chain(cores, repeat(None))))
    return [name for names in [*failed, _one_after_the_other(ALONE, options, out, None)] for name in names]


def _one_after_the_other(scripts: Sequence[str], options: Options, out: Path, core: int | None) -> list[str]:
    """Names of the scripts that failed; what each printed is shown when it ended."""
    failed = []
    for name in scripts:
        begun = time.monotonic()
        print(f"== {name} …", flush=True)
        arguments = ["--data", str(options.data), "--out", str(out), "--pairs", str(options.pairs)]
        script = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{name}", *arguments, *(["--quick"] * options.quick)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if core is not None:
            os.sched_setaffinity(script.pid, {core})
        printed, _ = script.communicate()
        print(f"{printed}== {name}: {(time.monotonic() - begun) / 60:.1f} min", flush=True)
        if script.returncode:
            failed.append(name)
    return failed


def what_moved(new: Report, stored: Report | None) -> list[str]:
    """Against the stored report; figures of another machine are no measure."""
    if stored is None:
        return [f"{new.group}: nothing was stored of this machine"]
    if stored.machine != new.machine:
        return [f"{new.group}: stored figures are of other versions or cores; not compared"]
    return moved(new.figures, stored.figures)


if __name__ == "__main__":
    main()
