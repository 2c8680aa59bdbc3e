"""All rows that a CPU can measure, script by script, each in a process of its own; then what moved, and the table anew.

    make bench                      or: python -m benchmarks.bench --data ../shared/data
    python -m benchmarks.bench --quick    every script at its smallest: shows that they work, stores nothing

A script that fails keeps its stored report; the others go on, and the exit status is 1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.options import parsed
from benchmarks.protocol import Report, moved, read_reports
from benchmarks.table import write_readme

SCRIPTS = ("step", "teachers", "rank_encoder", "pairs", "orchestration", "scale")


def main() -> None:
    options = parsed(__doc__)
    stored, failed, lines = read_reports(options.out), [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in SCRIPTS:
            begun = time.monotonic()
            print(f"== {name}", flush=True)
            told = ["--data", str(options.data), "--out", folder, "--pairs", str(options.pairs)]
            done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *told, *(["--quick"] * options.quick)])
            print(f"== {name}: {(time.monotonic() - begun) / 60:.1f} min", flush=True)
            if done.returncode:
                failed.append(name)
            elif not options.quick:
                report = Report.read(Path(folder) / f"{name}.json")
                lines += what_moved(report, stored.get(name))
                report.write(options.out)
    if not options.quick:
        write_readme(read_reports(options.out))
        print("what moved by more than its spread:", *(lines or ["nothing"]), sep="\n  ")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; their stored figures stay as they were")


def what_moved(new: Report, stored: Report | None) -> list[str]:
    """Against the stored report; figures of another machine are no measure."""
    if stored is None:
        return [f"{new.group}: nothing was stored before"]
    if stored.machine != new.machine:
        return [f"{new.group}: stored figures are of another machine or torch; not compared"]
    return moved(new.figures, stored.figures)


if __name__ == "__main__":
    main()
