"""Train a student: `python -m distcse.train RECIPE [key.path=value …]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distcse.command import (
    INTERRUPTED,
    NO_GAIN,
    STATUSES,
    ErrorStatus,
    StopOnSignal,
    add_output_options,
    add_recipe,
    add_start_options,
    parse_command,
    program,
    refuse_launchers,
)
from distcse.errors import ArgumentError
from distcse.gc_paused import gc_paused
from distcse.preflight.inputs import require_inputs
from distcse.ray_backend.cluster import shutdown_ray, start_ray
from distcse.recipe import BaseRecipe, packaged_recipes, read_recipe, recipe_yaml
from distcse.storage import open_store, to_uri

if TYPE_CHECKING:
    from pathlib import Path

    from distcse.api import Run


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, print. Returns the exit status (see `STATUSES`)."""
    options = parse_command(build_parser(), arguments)
    try:
        with ErrorStatus(kept="the last checkpoint is kept", as_json=options.json) as failed:
            refuse_launchers()
            overrides = _overrides(options)
            if options.print_recipe:
                source = options.recipe if options.resume is None else _stored(options.resume)
                sys.stdout.write(recipe_yaml(read_recipe(source, overrides)))
                return 0
            if options.dry_run:
                return _check(_read(options.recipe, overrides), options)

            # Report mistakes in the recipe and missing files first.
            is_new = options.resume is None and options.rerun is None
            recipe = _read(options.recipe, overrides) if is_new else None
            from distcse.report.progress import open_view

            with open_view(options.quiet, options.json, is_loading=True) as view:
                if recipe is not None and recipe.uses_ray:
                    start_ray()  # while torch and transformers are imported: each takes seconds
                with gc_paused():
                    from distcse.api import rerun, resume, run

                with (stop := StopOnSignal()):
                    if recipe is not None:
                        done = run(recipe, listen=view.show, stop_requested=stop.stop_requested)
                    else:
                        again = resume if options.rerun is None else rerun
                        earlier = options.rerun or options.resume
                        done = again(earlier, *overrides, listen=view.show, stop_requested=stop.stop_requested)
            _print(done, options.json)
            return INTERRUPTED if done.interrupted else 0 if done.improved else NO_GAIN
        return failed.status
    finally:
        shutdown_ray()


def _read(source: str, overrides: Sequence[str]) -> BaseRecipe:
    recipe = read_recipe(source, overrides)
    require_inputs(recipe)
    return recipe


def _overrides(options: argparse.Namespace) -> list[str]:
    """Return the overrides.

    Raises:
        ArgumentError: Options exclude each other, or the recipe is missing or named twice.
    """
    if options.rerun is None and options.resume is None:
        if options.recipe is None:
            raise ArgumentError(f"name a recipe or a YAML file; packaged recipes: {', '.join(packaged_recipes())}")
        run_id = [] if options.run_id is None else [f"storage.run_id={options.run_id}"]
        return [*options.overrides, *run_id]
    option = "--resume" if options.rerun is None else "--rerun"
    overrides = [*([options.recipe] if options.recipe else []), *options.overrides]
    if overrides and "=" not in overrides[0]:
        raise ArgumentError(f"{option} takes the recipe from the run's folder; take {overrides[0]} away")
    if options.run_id is not None:
        raise ArgumentError(f"{option} takes a run's folder; take --run-id away")
    if options.rerun is not None and (options.resume is not None or options.print_recipe or options.dry_run):
        raise ArgumentError("--rerun starts over, with the recipe of the run's folder; leave out the other option")
    if options.dry_run and not options.print_recipe:
        raise ArgumentError("--dry-run is for a run that has not begun; take --resume away")
    return overrides


def _stored(run: str) -> str:
    """Fetch a run's stored recipe and return its path."""
    store = open_store(run)
    store.fetch("recipe.yaml")
    return str(store.path / "recipe.yaml")


def _check(recipe: BaseRecipe, options: argparse.Namespace) -> int:
    """Carry out `--dry-run`."""
    from distcse.events import Reporter
    from distcse.report.progress import open_view, print_json, print_lines

    with open_view(options.quiet, options.json, is_loading=True) as view:
        with gc_paused():
            from distcse.experiments.experiment import experiment_of
            from distcse.ray_backend.backend import choose_backend

        experiment_of(recipe).check(choose_backend(recipe), Reporter(view.show))
    if options.json:
        print_json([{"event": "Checked", "recipe": options.recipe}])
    else:
        print_lines(["the dry run passed; leave out --dry-run to start the run"])
    return 0


def _print(done: Run, as_json: bool) -> None:
    from distcse.report.progress import print_json, print_lines
    from distcse.report.terminal import print_evaluation, print_remarks, results_as_json

    evaluation = done.result.evaluation
    if as_json:
        print_json([*(results_as_json(evaluation) if evaluation else []), _finished(done)])
        return
    if evaluation is not None:
        print_remarks(evaluation)
        print_evaluation(evaluation)
    lines = ["", *done.result.summary, f"run     {done.uri}"]
    if done.compared is not None:
        lines.append(f"weights {done.compared.description}")
    print_lines([*lines, *(f"report  {to_uri(file)}" for file in done.reports), *commands_for(done)])


def commands_for(done: Run) -> list[str]:
    """Return the lines that say what to do with a run next: resume it, use its model, evaluate it."""
    resume = [f"resume  {program('train')} --resume {done.uri}"] if done.interrupted else []
    if not done.models:
        return resume
    model = done.uri if len(done.models) == 1 else to_uri(next(iter(done.models.values())))
    reference = ""
    if (found := done.result.reference) is not None:
        pooling = "" if found.section.pooling is None else f" --pooling {found.section.pooling}"
        reference = f" {found.name}={found.section.backbone}{pooling}"
    commands = {
        f"{program('evaluate')} student={model}{reference} --texts FILE": "agreement and speed on your own text, without labels",
        f"{program('export')} {model} --onnx --int8": "ONNX files",
        **({f"{program('push')} {model} --to USER/NAME": "upload to the hub"} if done.improved else {}),
    }
    return [
        *resume,
        "",
        *(line for command, purpose in commands.items() for line in (f"# {purpose}", command)),
        *(_use(done.model) if len(done.models) == 1 else []),
    ]


def _use(model: Path) -> list[str]:
    return [
        "# use in Python",
        "from sentence_transformers import SentenceTransformer",
        f'model = SentenceTransformer("{model}")',
        'print(model.similarity(model.encode(["How do I sort a list?"]), model.encode(["Order the items."])))',
    ]


def _finished(done: Run) -> dict[str, Any]:
    return {
        "event": "Finished",
        "interrupted": done.interrupted,
        "run": done.uri,
        "models": {name: to_uri(model) for name, model in done.models.items()},
        "unchanged": done.result.unchanged,
        "reports": [to_uri(file) for file in done.reports],
        **({} if done.compared is None else {"weights": done.compared.description}),
    }


def build_parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog=program("train"),
        description="Distil a student sentence encoder from frozen teachers.",
        epilog="Example: %(prog)s rankcse-listmle-bert-base corpus.path=text.txt.gz objective.rank.tau2=0.025. "
        + STATUSES,
    )
    add_recipe(parser, nargs="?")
    parser.add_argument("--print-recipe", action="store_true", help="print the resolved recipe and stop")
    parser.add_argument(
        "--rerun",
        metavar="RUN",
        help="repeat the run in this directory, or at this address, in a new one, on the same data, and compare the weights",
    )
    add_start_options(parser, "run", "recipe, text, labelled sets, models and cluster")
    add_output_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
