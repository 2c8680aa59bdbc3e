"""The command tune: search a recipe's settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distcse.cli.shared import (
    Commands,
    add_command,
    add_output_options,
    add_recipe_words,
    add_start_options,
    finish,
    loading,
    program,
)
from distcse.cluster.cluster import start_ray
from distcse.devices import host
from distcse.devices.process import INTERRUPTED, NO_GAIN, StopOnSignal, refuse_launchers
from distcse.errors import PATHS_BY_NAME, ArgumentError, MissingDependencyError, UnknownKeyError, WorkFailedError
from distcse.report.progress import print_json, print_lines
from distcse.storage import resolve_path, to_uri

if TYPE_CHECKING:
    from distcse.recipe import BaseRecipe, Sweep
    from distcse.tuning.space import Space
    from distcse.tuning.sweep import SweepResult

_TUNE_PACKAGES = ("optuna", "simpleeval")


def add_commands(commands: Commands) -> None:
    """Add the command to the tree."""
    parser = add_command(
        commands,
        "tune",
        _tune,
        "Search a recipe's parameters with Ray Tune: many trials, one teacher pass.",
        "rankcse-listnet-bert-base --space rankcse-listnet corpus.path=text.txt.gz evaluation.data=data "
        "sweep.search.trials=48",
        kept="trials that ended are kept",
    )
    add_recipe_words(
        parser, optional=True, help="values that override the recipe's; sweep.key=value overrides the space's"
    )
    parser.add_argument("--space", metavar="SPACE", help="the search space: a packaged one's name, or a YAML file")
    parser.add_argument("--print-space", action="store_true", help="check and print the resolved space and stop")
    add_start_options(parser, "sweep", "recipe, space, text, labeled sets, models and cluster")
    add_output_options(parser)


def _tune(options: argparse.Namespace) -> int:
    from distcse.preflight.inputs import require_inputs

    refuse_launchers()
    try:
        if options.resume is not None:
            _refuse_with_resume(options)
            return _sweep(options, None)
        recipe, sweep = _recipe_and_space(options)
        if options.print_space:
            return _print_space(options, recipe, sweep)
        require_inputs(recipe)
        return _check_sweep(options, recipe, sweep) if options.dry_run else _sweep(options, (recipe, sweep))
    except ModuleNotFoundError as lacking:
        if lacking.name not in _TUNE_PACKAGES:
            raise
        raise MissingDependencyError(f"{lacking}; {host.pip_install('tune')}") from None


def _refuse_with_resume(options: argparse.Namespace) -> None:
    if options.recipe or options.space:
        raise ArgumentError("--resume takes recipe and space from the sweep's folder; name only the folder")
    if options.run_id is not None:
        raise ArgumentError("--resume takes a sweep's folder; take --run-id away")
    if options.dry_run or options.print_space:
        option = "--dry-run" if options.dry_run else "--print-space"
        raise ArgumentError(f"{option} is for a sweep that has not begun; take --resume away")


def _recipe_and_space(options: argparse.Namespace) -> tuple[BaseRecipe, Sweep]:
    """Read the recipe and the space of a new sweep."""
    from distcse.recipe import Sweep, packaged_recipes, packaged_spaces, read_recipe, read_sweep
    from distcse.recipe.base import recipe_classes
    from distcse.recipe.sweep import OVERRIDE_PREFIX

    if options.recipe is None or options.space is None:
        raise ArgumentError(
            f"name a recipe and a space: {program('tune')} RECIPE --space SPACE; recipes: "
            f"{', '.join(packaged_recipes())}; spaces: {', '.join(packaged_spaces())}"
        )
    of_space = [o.removeprefix(OVERRIDE_PREFIX) for o in options.overrides if o.startswith(OVERRIDE_PREFIX)]
    of_recipe = [o for o in options.overrides if not o.startswith(OVERRIDE_PREFIX)]
    if options.run_id is not None:
        of_recipe.append(f"storage.run_id={options.run_id}")
    try:
        recipe = read_recipe(options.recipe, of_recipe)
    except UnknownKeyError:
        recipe_keys = {key for kind in recipe_classes() for key in kind.model_fields}
        for override in of_recipe:
            key = override.partition("=")[0]
            meant = PATHS_BY_NAME.get(key, f"{OVERRIDE_PREFIX}{key}")
            if meant.removeprefix(OVERRIDE_PREFIX).partition(".")[0] in Sweep.model_fields.keys() - recipe_keys:
                raise UnknownKeyError(f"{key} is no key of the recipe; did you mean {meant!r}?") from None
        raise
    return recipe, read_sweep(options.space, of_space, override_prefix=OVERRIDE_PREFIX)


def _print_space(options: argparse.Namespace, recipe: BaseRecipe, sweep: Sweep) -> int:
    from distcse.recipe import recipe_yaml

    with loading(options):
        from distcse.tuning.space import Space

        space = Space(sweep, recipe)
    sys.stdout.write("".join(f"# {line}\n" for line in _describe_space(sweep, space)))
    sys.stdout.write(recipe_yaml(sweep))
    return 0


def _describe_space(sweep: Sweep, space: Space) -> list[str]:
    """Describe a space in a few lines: trials, schedule, seeds, and a line per parameter."""
    search = sweep.search
    trials = len(space.grid()) if search.algorithm == "grid" else search.trials
    seeds = len(sweep.final_runs.seeds)
    return [
        f"{trials} trials ({search.algorithm}), schedule {sweep.schedule.kind}, {seeds} final seed{'s' * (seeds != 1)}",
        *(f"{path}: {each.kind} {getattr(each, each.kind)}" for path, each in space.parameters.items()),
    ]


def _check_sweep(options: argparse.Namespace, recipe: BaseRecipe, sweep: Sweep) -> int:
    with loading(options) as listen:
        from distcse.cluster.backend import choose_backend
        from distcse.events import Reporter
        from distcse.runs.experiment import experiment_of
        from distcse.tuning.sweep import check
        from distcse.tuning.trial_resources import trial_resources

        check(recipe, sweep)
        experiment_of(recipe).check(
            choose_backend(recipe),
            Reporter(listen),
            lambda nodes: [*trial_resources(recipe, sweep, nodes).gpu_plans],
        )
    line = "the dry run passed; leave out --dry-run to start the sweep"
    return finish(options, [line], "Checked", recipe=options.recipe, space=options.space)


def _sweep(options: argparse.Namespace, new: tuple[BaseRecipe, Sweep] | None) -> int:
    """Begin a new sweep, or resume that of `--resume`."""
    with loading(options, lambda: start_ray(fast_allocator=True)) as listen:
        from distcse.cluster.sweep import run_sweep
        from distcse.events import Reporter
        from distcse.report.sweep_page import write_sweep_pages
        from distcse.tuning.sweep import begin, check, reopen

        directory, given = Path(), set[tuple[str, str]]()
        if new is None:
            directory = resolve_path(options.resume).absolute()
        else:
            check(*new)
            directory, given = begin(*new, Reporter(listen)), new[0].given_keys
        recipe, sweep = reopen(directory, given)
        with (stop := StopOnSignal()):
            result = run_sweep(recipe, sweep, directory, Reporter(listen, stop.stop_requested))
    _print_sweep(result, write_sweep_pages(result), options.json)
    return status_of(result)


def _print_sweep(result: SweepResult, pages: Sequence[Path], as_json: bool) -> None:
    from distcse.report.progress import format_values
    from distcse.report.sweep_page import rows_of, unfinished
    from distcse.report.terminal import print_summary

    trial = result.best_trial
    best = None if trial is None else trial.best
    if as_json:
        best_trial = None if trial is None or best is None else {"dev": best.score, "values": dict(trial.values)}
        print_json(
            [
                {
                    "event": "Finished",
                    "interrupted": result.interrupted,
                    "sweep": to_uri(result.directory),
                    "best_trial": best_trial,
                    "best_recipe": to_uri(result.best_recipe) if best_trial else None,
                    "reports": [to_uri(page) for page in pages],
                }
            ]
        )
        return
    lines = [""]
    print_summary(rows_of(result))
    if trial is not None and best is not None:
        start = "" if best.step else "  (its start: no trial is better)"
        lines += [
            f"best    dev {best.score:.2f}  {format_values(trial.values)}{start}",
            f"recipe  {to_uri(result.best_recipe)}",
        ]
    lines += [f"missing {run}" for run in unfinished(result)]
    lines += [f"report  {to_uri(file)}" for file in pages]
    lines.append(f"trials  {to_uri(result.directory / 'trials.csv')}")
    if result.interrupted:
        lines.append(f"resume  {program('tune')} --resume {to_uri(result.directory)}")
    elif trial is not None:
        lines.append(f"train   {program('train')} {to_uri(result.best_recipe)}")
    print_lines(lines)


def status_of(result: SweepResult) -> int:
    """Return a sweep's exit status: 130 interrupted, 3 if no trial is better than its start, else 0."""
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
