"""Look at this machine, and at all that a recipe wants, before a run: `python -m distcse.doctor [RECIPE]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distcse.command import add_recipe, exit_status, parse_command, program
from distcse.gc_paused import gc_paused
from distcse.recipe import BaseRecipe, StorageSection, read_recipe
from distcse.storage import resolve_path

if TYPE_CHECKING:
    from distcse.checks import Check


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, look, print. Returns the exit status: 0 nothing failed, 1 something did, 2 a mistake in the recipe."""
    options = parse_command(build_parser(), arguments)
    return exit_status(lambda: _main(options), kept="nothing was written")


def _main(options: argparse.Namespace) -> int:
    recipe = None if options.recipe is None else read_recipe(options.recipe, options.overrides)
    from distcse.checks import run_checks
    from distcse.report.lines import print_lines
    from distcse.report.progress import open_view

    with open_view(quiet=options.json, is_loading=True), gc_paused():
        from distcse.health import machine, settings, sources, storage
        from distcse.ray_backend import cluster_checks

    runs, cache = _storage(recipe)
    checks: list[Callable[[], list[Check]]] = [
        machine.check_python,
        machine.check_packages,
        machine.check_cpus,
        partial(machine.check_gpus, recipe),
        partial(machine.check_precision, recipe),
        machine.check_memory,
        machine.check_shared_memory,
        machine.check_open_files,
        partial(machine.check_deepspeed, recipe),
        cluster_checks.check_version,
        partial(cluster_checks.check_cluster, {"storage.runs": runs, "storage.cache": cache}, recipe),
        cluster_checks.check_token,
        cluster_checks.check_ports,
        *(
            partial(storage.check_location, name, path)
            for name, path in (("storage.runs", runs), ("storage.cache", cache))
        ),
    ]
    if recipe is not None:
        checks += [
            partial(sources.check_models, recipe),
            partial(sources.check_text, recipe),
            partial(settings.check_settings, recipe),
        ]
    found: list[Check] = []
    for check in run_checks(checks):
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


def _storage(recipe: BaseRecipe | None) -> tuple[Path, Path]:
    """Folders of runs and cache, the recipe's or the defaults."""
    section = StorageSection() if recipe is None else recipe.storage
    cache = (os.environ.get("DISTCSE_CACHE") or section.cache) if recipe is None else section.cache
    return resolve_path(section.runs).expanduser().absolute(), resolve_path(cache).expanduser().absolute()


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
