"""Command-line options of all scripts, and the environment that their processes need."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import STORED
from distcse.devices.host import MALLOC_ENV

_NEEDED = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    **MALLOC_ENV,
}


@dataclass(frozen=True)
class Options:
    """How a script is run.

    Attributes:
        data: Folder with `sts/`, `pairs/` and `corpus/`.
        out: Folder of the reports.
        quick: Two pairs of the smallest sizes: shows that the code works, and stores nothing.
        pairs: Rounds of what a ratio is made of.
        only: Rows that are wanted; none given wants all of the script's.
    """

    data: Path
    out: Path
    quick: bool
    pairs: int
    only: frozenset[int]

    def wants(self, *rows: int) -> bool:
        """Whether one of these rows is wanted."""
        return not self.only or bool(self.only & set(rows))


def parsed(description: str | None, arguments: list[str] | None = None) -> Options:
    """From the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("DISTCSE_DATA", "../shared/data")))
    parser.add_argument("--out", type=Path, default=STORED, help="folder of the JSON reports")
    parser.add_argument("--quick", action="store_true", help="two pairs at the smallest sizes; no figure counts")
    parser.add_argument("--pairs", type=int, default=15, help="rounds of every comparison")
    parser.add_argument("--rows", type=int, nargs="+", default=[], help="these rows alone; prints, stores nothing")
    options = parser.parse_args(arguments)
    return Options(
        options.data.absolute(),
        options.out,
        options.quick,
        2 if options.quick else options.pairs,
        frozenset(options.rows),
    )


def settled(module: str, environment: Iterable[tuple[str, str]] = _NEEDED.items()) -> None:
    """Start this script over with the environment it needs: one thread, and the allocator of distcse's own workers."""
    missing = {name: value for name, value in environment if os.environ.get(name) != value}
    if missing:
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **missing})


def script(module: str, description: str | None, measure: Callable[[Options], Any]) -> None:
    """Run a script: measure, print, store unless it was a trial."""
    settled(module)
    import torch

    from benchmarks.table import lines_of

    torch.set_num_threads(1)
    options = parsed(description)
    report = measure(options)
    print("\n".join(lines_of(report)))
    if options.quick or options.only:
        print("a trial: nothing is stored, no figure counts")
    else:
        print(f"written: {report.write(options.out)}")
