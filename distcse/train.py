"""Train a student: `python -m distcse.train RECIPE [key.path=value …]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distcse.command import INTERRUPTED, STATUSES, StopOnSignal, add_output_options, exit_status
from distcse.errors import CommandLineError
from distcse.gc_paused import gc_paused
from distcse.ray_backend.cluster import shutdown_ray, start_ray
from distcse.recipe import MutualRecipe, Recipe, packaged_recipes, read_recipe, recipe_yaml
from distcse.storage import fetch, resolve_path, to_uri

if TYPE_CHECKING:
    from distcse.running import Run


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, print. Returns the exit status: 0 done, 1 failed, 2 a mistake in the recipe, 130 interrupted."""
    options = build_parser().parse_intermixed_args(arguments)
    try:
        return exit_status(lambda: _main(options), kept="the last checkpoint is kept", as_json=options.json)
    finally:
        shutdown_ray()


def _main(options: argparse.Namespace) -> int:
    if options.rerun is not None:
        return _rerun(options)
    if options.resume is None and options.recipe is None:
        raise CommandLineError(f"name a recipe or a YAML file; packaged recipes: {', '.join(packaged_recipes())}")
    overrides = list(options.overrides)
    if options.resume is not None and options.recipe:
        if "=" not in options.recipe:
            raise CommandLineError(f"--resume takes the recipe from the run's folder; take {options.recipe} away")
        overrides.insert(0, options.recipe)
    if options.print_recipe:
        source = options.recipe if options.resume is None else _stored(options.resume)
        sys.stdout.write(recipe_yaml(read_recipe(source, overrides)))
        return 0

    # Report a mistake in the recipe first. Then start Ray while torch and transformers are imported: each takes seconds.
    if options.resume is None:
        recipe = read_recipe(options.recipe, overrides)
        if options.dry_run:
            return _check(recipe, options)
        if recipe.ray if isinstance(recipe, MutualRecipe) else recipe.training.workers:
            start_ray()
    if options.dry_run:
        raise CommandLineError("--dry-run is for a run that has not begun; take --resume away")

    with gc_paused():
        from distcse.report.progress import open_view
        from distcse.running import resume, run

    stop = StopOnSignal()
    with open_view(options.quiet, options.json) as view, stop:
        if options.resume is None:
            done = run(recipe, listen=view.show, stop_requested=stop.stop_requested)
        else:
            done = resume(options.resume, *overrides, listen=view.show, stop_requested=stop.stop_requested)
    _print(done, options.json)
    return INTERRUPTED if done.interrupted else 0


def _stored(run: str) -> str:
    """Fetch a run's stored recipe and return its path."""
    file = resolve_path(run) / "recipe.yaml"
    fetch(file)
    return str(file)


def _rerun(options: argparse.Namespace) -> int:
    """Carry out `--rerun`."""
    if options.resume is not None or options.print_recipe or options.dry_run:
        raise CommandLineError(
            "--rerun takes the recipe from the run's folder and starts over; leave out the other option"
        )
    overrides = [*([options.recipe] if options.recipe else []), *options.overrides]
    if overrides and "=" not in overrides[0]:
        raise CommandLineError(f"--rerun takes the recipe from the run's folder; take {overrides[0]} away")

    with gc_paused():
        from distcse.report.progress import open_view
        from distcse.running import rerun

    stop = StopOnSignal()
    with open_view(options.quiet, options.json) as view, stop:
        done = rerun(options.rerun, *overrides, listen=view.show, stop_requested=stop.stop_requested)
    _print(done, options.json)
    return INTERRUPTED if done.interrupted else 0


def _check(recipe: Recipe | MutualRecipe, options: argparse.Namespace) -> int:
    """Carry out `--dry-run`."""
    from distcse.events import Reporter
    from distcse.experiments.distillation.preflight import check_run
    from distcse.experiments.mutual.preflight import check_groups
    from distcse.report.progress import open_view
    from distcse.report.terminal import print_json, print_lines

    with open_view(options.quiet, options.json) as view:
        if isinstance(recipe, MutualRecipe):
            check_groups(recipe, Reporter(view.show))
        else:
            check_run(recipe, Reporter(view.show))
    if options.json:
        print_json([{"event": "Checked", "recipe": options.recipe}])
    else:
        print_lines(["the dry run passed; leave out --dry-run to start the run"])
    return 0


def _print(done: Run, as_json: bool) -> None:
    from distcse.report.terminal import print_evaluation, print_json, print_lines, print_remarks, scores_as_json

    evaluation = done.result.evaluation
    if as_json:
        print_json([*(scores_as_json(evaluation) if evaluation else []), _finished(done)])
        return
    if evaluation is not None:
        print_remarks(evaluation)
        print_evaluation(evaluation)
    print_lines(["", *_result_lines(done), *(f"report  {to_uri(file)}" for file in done.reports), *_what_next(done)])


def _result_lines(done: Run) -> list[str]:
    """List the models and the run's folder."""
    from distcse.experiments.mutual import MutualResult

    lines = [f"model   {to_uri(model)}" for model in done.models.values()]
    if isinstance(done.result, MutualResult):
        lines = []
        for best in done.result.best:
            dev = "" if best.dev is None else f"  dev {best.dev:.2f}"
            lines.append(f"{best.group} {best.kind:<5}  {to_uri(best.model)}  (cycle {best.phase.cycle}{dev})")
        lines += [f"dropped  {group}: {why}" for group, why in done.result.dropped.items()]
    lines.append(f"run     {done.uri}")
    return lines if done.compared is None else [*lines, f"weights {done.compared.description}"]


def _what_next(done: Run) -> list[str]:
    resume = [f"resume  python -m distcse.train --resume {done.uri}"] if done.interrupted else []
    if list(done.models) != ["student"]:
        return resume
    return [
        *resume,
        "",
        "from sentence_transformers import SentenceTransformer",
        f'model = SentenceTransformer("{done.model}")',
        'print(model.similarity(model.encode(["How do I sort a list?"]), model.encode(["Order the items."])))',
    ]


def _finished(done: Run) -> dict[str, Any]:
    return {
        "event": "Finished",
        "interrupted": done.interrupted,
        "run": done.uri,
        "models": {name: to_uri(model) for name, model in done.models.items()},
        "reports": [to_uri(file) for file in done.reports],
        **({} if done.compared is None else {"weights": done.compared.description}),
    }


def build_parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog="python -m distcse.train",
        description="Distil a student sentence encoder from frozen teachers.",
        epilog="Example: python -m distcse.train rankcse-listmle-bert-base corpus.path=text.txt.gz objective.rank.tau2=0.025. "
        + STATUSES,
    )
    parser.add_argument("recipe", nargs="?", help="a packaged recipe's name, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that override the recipe's")
    parser.add_argument("--print-recipe", action="store_true", help="print the resolved recipe and stop")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check recipe, text, labelled sets, models and cluster; embed and train nothing",
    )
    parser.add_argument(
        "--rerun",
        metavar="RUN",
        help="repeat the run in this directory, or at this address, in a new one, on the same data, and compare the weights",
    )
    parser.add_argument("--resume", metavar="RUN", help="resume the run in this directory, or at this address")
    add_output_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
