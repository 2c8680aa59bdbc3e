"""Train a student: `python -m distcse.train RECIPE [key.path=value …]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distcse.command import INTERRUPTED, StopOnSignal, exit_status
from distcse.errors import RecipeError
from distcse.recipe import MutualRecipe, Recipe, packaged_recipes, read_recipe, recipe_yaml

if TYPE_CHECKING:
    from distcse.training.directory import RunDirectory


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, print. Returns the exit status: 0 done, 1 failed, 2 a mistake in the recipe, 130 interrupted."""
    options = _parser().parse_intermixed_args(arguments)
    return exit_status(lambda: _main(options), kept="the last checkpoint is kept")


def _main(options: argparse.Namespace) -> int:
    if options.resume is None and options.recipe is None:
        raise RecipeError(f"name a recipe or a YAML file; packaged recipes: {', '.join(packaged_recipes())}")
    if options.print_recipe:
        sys.stdout.write(recipe_yaml(read_recipe(options.recipe or f"{options.resume}/recipe.yaml", options.overrides)))
        return 0

    # Torch, transformers and Ray take seconds to import; a mistake in the recipe is told before.
    if options.resume is None:
        recipe, resumed = read_recipe(options.recipe, options.overrides), None
    else:
        from distcse.training.directory import RunDirectory

        overrides = [options.recipe, *options.overrides] if options.recipe else options.overrides
        resumed, recipe = RunDirectory.reopen(options.resume.absolute(), overrides)
    if isinstance(recipe, MutualRecipe):
        return _train_groups(recipe, resumed)
    return _train_student(recipe, resumed)


def _train_student(recipe: Recipe, resumed: RunDirectory | None) -> int:
    from distcse.events import Watch
    from distcse.report.card import write_card
    from distcse.report.history import read_run
    from distcse.report.page import write_pages
    from distcse.report.terminal import open_view, print_evaluation, print_lines, print_remarks
    from distcse.student.run import run

    stop = StopOnSignal()
    with open_view() as view, stop:
        result = run(recipe, Watch(view.show, stop.wished), resumed)
        write_card(result)
    folder = result.directory
    lines = ["", f"model   {folder.model}", f"run     {folder.path}"]
    if result.evaluation is not None:
        print_remarks(result.evaluation)
        print_evaluation(result.evaluation)
        lines += [f"report  {file}" for file in write_pages(result.evaluation, folder.path, read_run(folder.path))]
    if result.outcome.interrupted:
        lines.append(f"resume  python -m distcse.train --resume {folder.path}")
    lines += [
        "",
        "from sentence_transformers import SentenceTransformer",
        f'model = SentenceTransformer("{folder.model}")',
        'print(model.similarity(model.encode(["How do I sort a list?"]), model.encode(["Order the items."])))',
    ]
    print_lines(lines)
    return INTERRUPTED if result.outcome.interrupted else 0


def _train_groups(recipe: MutualRecipe, resumed: RunDirectory | None) -> int:
    from distcse.events import Watch
    from distcse.mutual import run_mutual
    from distcse.report.group_card import write_group_cards
    from distcse.report.history import read_run
    from distcse.report.page import write_pages
    from distcse.report.terminal import open_view, print_evaluation, print_lines, print_remarks

    stop = StopOnSignal()
    with open_view() as view, stop:
        result = run_mutual(recipe, Watch(view.show, stop.wished), resumed)
        write_group_cards(result)
    run = result.directory.path
    lines = [""]
    if result.evaluation is not None:
        print_remarks(result.evaluation)
        print_evaluation(result.evaluation)
        lines += [f"report  {file}" for file in write_pages(result.evaluation, run, read_run(run))]
    for best in result.best:
        dev = "" if best.dev is None else f"  dev {best.dev:.2f}"
        lines.append(f"{best.group} {best.kind:<5}  {best.model}  (cycle {best.phase.cycle}{dev})")
    lines += [f"dropped  {group}: {why}" for group, why in result.dropped.items()]
    lines.append(f"run     {run}")
    if result.interrupted:
        lines.append(f"resume  python -m distcse.train --resume {run}")
    print_lines(lines)
    return INTERRUPTED if result.interrupted else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m distcse.train",
        description="Distil a student sentence encoder from frozen teachers.",
        epilog="Example: python -m distcse.train rankcse-listmle-bert-base corpus.path=text.txt.gz objective.rank.tau2=0.025",
    )
    parser.add_argument("recipe", nargs="?", help="a packaged recipe's name, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="knobs set over the recipe")
    parser.add_argument("--print-recipe", action="store_true", help="print the resolved recipe and stop")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this directory")
    return parser


if __name__ == "__main__":
    sys.exit(main())
