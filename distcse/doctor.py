"""Look at this machine, and at all that a recipe wants, before a run: `python -m distcse.doctor [RECIPE]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from distcse.command import add_recipe, exit_status, parse_command, program
from distcse.gc_paused import gc_paused
from distcse.recipe import read_recipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, look, print. Returns the exit status: 0 nothing failed, 1 something did, 2 a mistake in the recipe."""
    options = parse_command(build_parser(), arguments)
    return exit_status(lambda: _main(options), kept="nothing was written")


def _main(options: argparse.Namespace) -> int:
    recipe = None if options.recipe is None else read_recipe(options.recipe, options.overrides)
    from distcse.report.progress import open_view, print_lines

    with open_view(quiet=options.json, is_loading=True), gc_paused():
        from distcse.ray_backend.health import diagnose

    found = []
    for check in diagnose(recipe):
        found.append(check)
        if not options.json:
            print_lines([check.line])
    if options.json:
        json.dump([vars(check) for check in found], sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        counts = {verdict: sum(check.verdict == verdict for check in found) for verdict in ("ok", "warn", "fail")}
        summary = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
        print_lines(["", summary])
    return int(any(check.verdict == "fail" for check in found))


def build_parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog=program("doctor"),
        description="Look at Python, torch, GPUs, Ray, DeepSpeed, limits and storage, and at a recipe's models and text.",
        epilog="Example: %(prog)s my-recipe.yaml",
    )
    add_recipe(parser, nargs="?")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
