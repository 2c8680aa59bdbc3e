"""Write a task's pairs for mutual distillation: `python -m distcse.pairs qnli QNLI/train.tsv QNLI/dev.tsv --data data`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from distcse.command import STATUSES, add_output_options, exit_status, parse_command, program
from distcse.gc_paused import gc_paused
from distcse.storage import refuse_job_copy

TASKS = ("sts_unlabelled", "qqp", "qnli", "mrpc")
"""`PAIR_TASKS` of `distcse.evaluation.task_pairs`, whose import takes seconds that `--help` does not wait for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, write, print. Returns the exit status: 0 done, 1 failed, 130 interrupted."""
    options = parse_command(build_parser(), arguments)
    return exit_status(lambda: _main(options), kept="complete files were kept", as_json=options.json)


def _main(options: argparse.Namespace) -> int:
    refuse_job_copy("--data", options.data, "write --data /shared/data")
    from distcse.report.progress import open_view, print_json, print_lines

    with open_view(options.quiet or options.json, is_loading=True):
        with gc_paused():
            from distcse.evaluation.task_pairs import write_task_pairs

        written = write_task_pairs(options.task, options.data, options.files)
    if options.json:
        files = [{"file": str(each.file), "pairs": each.pairs, "published": each.published} for each in written]
        print_json([{"event": "Finished", "files": files}])
    else:
        print_lines([f"{each.file}  {each.pairs:,} pairs (paper: {each.published:,})" for each in written])
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog=program("pairs"),
        description="Write the pairs on which Trans-Encoder trains, DATA/pairs/TASK, from the data sets' own files, with the "
        "splits of its public code.",
        epilog=f"Example: %(prog)s qnli QNLI/train.tsv QNLI/dev.tsv --data data. {STATUSES}",
    )
    parser.add_argument("task", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="qqp and mrpc: train, dev and test; qnli: train and validation; sts_unlabelled: none, or further pairs",
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the data folder")
    add_output_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
