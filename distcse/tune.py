"""Search a recipe's parameters: `python -m distcse.tune RECIPE --space SPACE [key.path=value …]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcse.command import (
    INTERRUPTED,
    NO_GAIN,
    STATUSES,
    StopOnSignal,
    add_output_options,
    add_recipe,
    add_start_options,
    exit_status,
    parse_command,
    program,
    refuse_launchers,
)
from distcse.errors import ArgumentError, MissingDependencyError, UnknownKeyError, WorkFailedError
from distcse.gc_paused import gc_paused
from distcse.host import pip_install
from distcse.preflight.inputs import require_inputs
from distcse.ray_backend.cluster import shutdown_ray, start_ray
from distcse.recipe import BaseRecipe, Sweep, packaged_recipes, packaged_spaces, read_recipe, read_sweep, recipe_yaml
from distcse.recipe.base import recipe_classes
from distcse.recipe.sweep import OVERRIDE_PREFIX
from distcse.spelling import PATHS_BY_NAME
from distcse.storage import resolve_path, to_uri

if TYPE_CHECKING:
    from distcse.placement.gpu_plan import GpuPlan
    from distcse.placement.resources import Node
    from distcse.tuning.space import Space
    from distcse.tuning.sweep import SweepResult

_EXTRA = ("optuna", "simpleeval")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, search, print. Returns the exit status: 0 done, 1 failed, 2 a mistake in recipe or space, 130 interrupted."""
    options = parse_command(build_parser(), arguments)
    try:
        return exit_status(lambda: _with_extra(options), kept="trials that ended are kept", as_json=options.json)
    finally:
        shutdown_ray()


def _with_extra(options: argparse.Namespace) -> int:
    try:
        return _main(options)
    except ModuleNotFoundError as lacking:
        if lacking.name not in _EXTRA:
            raise
        raise MissingDependencyError(f"{lacking}; {pip_install('tune')}") from None


def _main(options: argparse.Namespace) -> int:
    refuse_launchers()
    if options.resume is not None:
        if options.recipe or options.space:
            raise ArgumentError("--resume takes recipe and space from the sweep's folder; name only the folder")
        if options.run_id is not None:
            raise ArgumentError("--resume takes a sweep's folder; take --run-id away")
        if options.dry_run or options.print_space:
            option = "--dry-run" if options.dry_run else "--print-space"
            raise ArgumentError(f"{option} is for a sweep that has not begun; take --resume away")
        return _sweep(options, resolve_path(options.resume).absolute(), None, None)
    if options.recipe is None or options.space is None:
        raise ArgumentError(
            f"name a recipe and a space: {program('tune')} RECIPE --space SPACE; recipes: "
            f"{', '.join(packaged_recipes())}; spaces: {', '.join(packaged_spaces())}"
        )
    ours = [
        override.removeprefix(OVERRIDE_PREFIX) for override in options.overrides if override.startswith(OVERRIDE_PREFIX)
    ]
    of_recipe = [o for o in options.overrides if not o.startswith(OVERRIDE_PREFIX)]
    if options.run_id is not None:
        of_recipe.append(f"storage.run_id={options.run_id}")
    recipe = _recipe(options.recipe, of_recipe)
    sweep = read_sweep(options.space, ours, override_prefix=OVERRIDE_PREFIX)
    if options.print_space:
        from distcse.report.progress import open_view

        with open_view(options.quiet, is_loading=True), gc_paused():
            from distcse.tuning.space import Space

            space = Space(sweep, recipe)
        sys.stdout.write("".join(f"# {line}\n" for line in _describe_space(sweep, space)))
        sys.stdout.write(recipe_yaml(sweep))
        return 0
    require_inputs(recipe)
    if options.dry_run:
        return _check(options, recipe, sweep)
    return _sweep(options, None, recipe, sweep)


def _recipe(name: str, overrides: Sequence[str]) -> BaseRecipe:
    """Read the recipe. Raises `UnknownKeyError` also for a key of the space that lacks its prefix."""
    try:
        return read_recipe(name, overrides)
    except UnknownKeyError:
        recipe_keys = {key for kind in recipe_classes() for key in kind.model_fields}
        for override in overrides:
            key = override.partition("=")[0]
            meant = PATHS_BY_NAME.get(key, f"{OVERRIDE_PREFIX}{key}")
            if meant.removeprefix(OVERRIDE_PREFIX).partition(".")[0] in Sweep.model_fields.keys() - recipe_keys:
                raise UnknownKeyError(f"{key} is no key of the recipe; did you mean {meant!r}?") from None
        raise


def _describe_space(sweep: Sweep, space: Space) -> list[str]:
    """Describe a space in a few lines: trials, schedule, seeds, and a line per parameter."""
    search = sweep.search
    trials = len(space.grid()) if search.algorithm == "grid" else search.trials
    seeds = len(sweep.final_runs.seeds)
    lines = [
        f"{trials} trials ({search.algorithm}), schedule {sweep.schedule.kind}, {seeds} final seed{'s' * (seeds != 1)}"
    ]
    for path, parameter in space.parameters.items():
        lines.append(f"{path}: {parameter.kind} {getattr(parameter, parameter.kind)}")
    return lines


def _check(options: argparse.Namespace, recipe: BaseRecipe, sweep: Sweep) -> int:
    """`--dry-run`."""
    from distcse.events import Reporter
    from distcse.report.progress import open_view, print_json, print_lines

    with open_view(options.quiet, options.json, is_loading=True) as view:
        with gc_paused():
            from distcse.experiments.experiment import experiment_of
            from distcse.ray_backend.backend import choose_backend
            from distcse.tuning.sweep import check

        check(recipe, sweep)
        experiment_of(recipe).check(
            choose_backend(recipe), Reporter(view.show), lambda nodes: _plan(recipe, sweep, nodes)
        )
    if options.json:
        print_json([{"event": "Checked", "recipe": options.recipe, "space": options.space}])
    else:
        print_lines(["the dry run passed; leave out --dry-run to start the sweep"])
    return 0


def _plan(recipe: BaseRecipe, sweep: Sweep, nodes: Sequence[Node]) -> list[GpuPlan]:
    """Decide the GPUs of a sweep. Raises `ClusterTooSmallError` if the trials do not fit."""
    from distcse.tuning.trial_resources import plans_of_trials, trial_resources

    return plans_of_trials(recipe, sweep, trial_resources(recipe, sweep, nodes), nodes)


def _sweep(options: argparse.Namespace, directory: Path | None, recipe: BaseRecipe | None, sweep: Sweep | None) -> int:
    # A new sweep's recipe and space are read by now.
    from distcse.report.progress import open_view

    with open_view(options.quiet, options.json, is_loading=True) as view:
        start_ray(fast_allocator=True)  # while torch and transformers are imported: each takes seconds
        with gc_paused():
            from distcse.events import Reporter
            from distcse.ray_backend.sweep import run_sweep
            from distcse.report.progress import format_values, print_json, print_lines
            from distcse.report.sweep_page import rows_of, unfinished, write_sweep_pages
            from distcse.report.terminal import print_summary
            from distcse.tuning.sweep import begin, check, reopen

        given = set[tuple[str, str]]()
        if recipe is not None and sweep is not None:
            check(recipe, sweep)
            directory, given = begin(recipe, sweep, Reporter(view.show)), recipe.given_keys
        assert directory is not None
        recipe, sweep = reopen(directory, given)
        with (stop := StopOnSignal()):
            reporter = Reporter(view.show, stop.stop_requested)
            result = run_sweep(recipe, sweep, directory, reporter)
    pages = write_sweep_pages(result)
    if options.json:
        print_json([_finished(result, pages)])
        return status_of(result)
    lines = [""]
    print_summary(rows_of(result))
    if result.best_trial is not None and result.best_trial.best is not None:
        lines += [
            f"best    dev {result.best_trial.best.score:.2f}  {format_values(result.best_trial.values)}"
            + ("" if result.best_trial.best.step else "  (its start: no trial is better)"),
            f"recipe  {to_uri(result.best_recipe)}",
        ]
    lines += [f"missing {run}" for run in unfinished(result)]
    lines += [f"report  {to_uri(file)}" for file in pages]
    lines.append(f"trials  {to_uri(directory / 'trials.csv')}")
    if result.interrupted:
        lines.append(f"resume  {program('tune')} --resume {to_uri(directory)}")
    elif result.best_trial is not None:
        lines.append(f"train   {program('train')} {to_uri(result.best_recipe)}")
    print_lines(lines)
    return status_of(result)


def _finished(result: SweepResult, pages: Sequence[Path]) -> dict[str, Any]:
    best = None if result.best_trial is None else result.best_trial.best
    best_trial = (
        None
        if result.best_trial is None or best is None
        else {"dev": best.score, "values": dict(result.best_trial.values)}
    )
    return {
        "event": "Finished",
        "interrupted": result.interrupted,
        "sweep": to_uri(result.directory),
        "best_trial": best_trial,
        "best_recipe": to_uri(result.best_recipe) if best_trial else None,
        "reports": [to_uri(page) for page in pages],
    }


def status_of(result: SweepResult) -> int:
    """Return a sweep's exit status: 130 interrupted, 3 if no trial is better than its start, else 0.

    Raises:
        WorkFailedError: No trial or no final run finished.
    """
    if result.interrupted:
        return INTERRUPTED
    if result.best_trial is None:
        reason = next((trial.reason for trial in result.trials if trial.reason), "see its events")
        raise WorkFailedError(f"no trial of {len(result.trials)} finished; the first failed with: {reason}")
    lost = [run for run in result.final_results if run.status != "finished"]
    if lost and len(lost) == len(result.final_results):
        raise WorkFailedError(f"none of the {len(lost)} final runs finished; the first failed with: {lost[0].reason}")
    best = result.best_trial.best
    return NO_GAIN if best is not None and not best.step else 0


def build_parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog=program("tune"),
        description="Search a recipe's parameters with Ray Tune: many trials, one teacher pass.",
        epilog="Example: %(prog)s rankcse-listnet-bert-base --space rankcse-listnet "
        f"corpus.path=text.txt.gz evaluation.data=data sweep.search.trials=48. {STATUSES}",
    )
    add_recipe(parser, nargs="?", help="values that override the recipe's; sweep.key=value overrides the space's")
    parser.add_argument("--space", metavar="SPACE", help="the search space: a packaged one's name, or a YAML file")
    parser.add_argument("--print-space", action="store_true", help="check and print the resolved space and stop")
    add_start_options(parser, "sweep", "recipe, space, text, labelled sets, models and cluster")
    add_output_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
