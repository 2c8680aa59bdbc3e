"""Print versions, devices, memory and Ray, for a bug report: `distcse env`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.resources import files

from distcse.command import exit_status, parse_command, program
from distcse.gc_paused import gc_paused


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, look, print. Returns the exit status: 0 done, 1 failed."""
    options = parse_command(build_parser(), arguments)
    return exit_status(lambda: _main(options), kept="nothing was written")


def _main(options: argparse.Namespace) -> int:
    if options.constraints:
        sys.stdout.write(files("distcse").joinpath("constraints.txt").read_text())
        return 0
    from distcse.report.progress import open_view, print_lines

    with open_view(quiet=options.json, is_loading=True):
        with gc_paused():
            from distcse.preflight.machine import describe_environment
            from distcse.ray_backend.health import check_cluster

        found = describe_environment()
        found["ray cluster"] = "; ".join(check.found for check in check_cluster())
    if options.json:
        json.dump(found, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        width = max(map(len, found))
        print_lines([f"{name:<{width}}  {value}" for name, value in found.items()])
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog=program("env"),
        description="Print what a bug report needs: versions, devices, memory, Ray, and the variables that change a run. "
        "Secrets are not shown. `distcse doctor` also says what is wrong, and how to fix it.",
        epilog="Example: %(prog)s",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--constraints",
        action="store_true",
        help="print the tested versions of all packages instead, for pip install --constraint",
    )
    how.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
