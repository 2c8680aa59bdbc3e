"""What a recipe would cost, before anything is spent: `python -m distcse.plan RECIPE --cluster 8xA100-40G`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from distcse.command import add_recipe, exit_status, parse_command, program
from distcse.errors import ArgumentError, ClusterTooSmallError
from distcse.gc_paused import gc_paused
from distcse.recipe import read_recipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, reckon, print. Returns the exit status: 0 it fits, 1 it cannot be done, 2 a mistake in what was asked."""
    options = parse_command(build_parser(), arguments)
    return exit_status(lambda: _main(options), kept="nothing was written")


def _main(options: argparse.Namespace) -> int:
    from distcse.planning.machines import parse_cluster

    for name, numbers in (("--corpus-rows", [options.corpus_rows]), ("--gpus", options.gpus or [])):
        if any(number is not None and number < 1 for number in numbers):
            raise ArgumentError(f"{name} is {numbers}; write numbers from 1 on")
    form = parse_cluster(options.cluster)
    recipe = read_recipe(options.recipe, options.overrides)
    if options.measure and form[2] != "local":
        raise ArgumentError(f"--measure runs on this machine; --cluster is {options.cluster}: write --cluster local")
    from distcse.report.progress import open_view, print_lines

    with open_view(quiet=options.json, is_loading=True):
        with gc_paused():
            from distcse.experiments.experiment import experiment_of
            from distcse.planning.planner import Question, measure, open_cluster, plan, with_precisions

        recipe, measured = with_precisions(recipe, form), None
        if options.measure:
            from distcse.api import run

            measured = measure(recipe, lambda short, listen: run(short, listen=listen))
        asked = Question(open_cluster(options.cluster, form, recipe), options.corpus_rows, options.gpus or [], measured)
        estimate = plan(recipe, asked)
        warnings = experiment_of(recipe).warnings(options.corpus_rows)
    if options.json:
        json.dump({**estimate.described, "warnings": [vars(warning) for warning in warnings]}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print_lines([*estimate.lines, *(f"warning    {warning.text}" for warning in warnings)])
    if estimate.problems:
        raise ClusterTooSmallError(f"this plan cannot be carried out: {estimate.problems[0]}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog=program("plan"),
        description="What a recipe costs on given machines: time, memory, disk, what binds; nothing is run without --measure.",
        epilog="Example: %(prog)s rankcse-listmle-bert-base --cluster 2x8xH100-80G --corpus-rows 1000000 "
        "--gpus 1 8 64 512 1000",
    )
    add_recipe(parser)
    parser.add_argument(
        "--cluster",
        default="local",
        metavar="MACHINES",
        help="8xA100-40G, 2x8xH100-80G (nodes x GPUs), 2xcpu (machines like this one), or local (default)",
    )
    parser.add_argument(
        "--corpus-rows",
        type=int,
        metavar="N",
        help="sentences (or pairs) to plan for; default: those of the recipe's text",
    )
    parser.add_argument("--gpus", type=int, nargs="+", metavar="N", help="also a table for these numbers of devices")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run twenty steps on a sample of the recipe's text on this machine first, and plan with their times",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
