"""The command embed: the teachers' pass without a run, and a comparison of the teachers before it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from distcse.cli.shared import Commands, add_command, add_output_options, add_recipe_words, finish, loading
from distcse.devices.process import StopOnSignal, refuse_launchers
from distcse.report.progress import print_json
from distcse.storage import to_uri

if TYPE_CHECKING:
    from distcse.recipe import Recipe


def add_commands(commands: Commands) -> None:
    """Add the command to the tree."""
    parser = add_command(
        commands,
        "embed",
        _embed,
        "Embed a corpus once by every teacher of a recipe, for all later runs; or see first how far they agree.",
        "my-recipe.yaml --compare",
        kept="completed shards are kept",
    )
    add_recipe_words(parser)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="embed a sample only: a card for each teacher, agreement of each two, and what the ensemble loses on the labeled "
        "dev sets without each",
    )
    parser.add_argument(
        "--fit-weights",
        action="store_true",
        help="fit the teachers' alpha to the ensemble's score on the labeled dev sets (evaluation.data), without a student",
    )
    parser.add_argument(
        "--sentences", type=int, default=2000, metavar="N", help="sentences of the comparison (default: 2000)"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="read the text and ask each teacher once; of an embedding, count the rows that are left and join the cluster; "
        "embed nothing",
    )
    add_output_options(parser)


def _embed(options: argparse.Namespace) -> int:
    from distcse.preflight.inputs import require_inputs
    from distcse.recipe import load_recipe

    refuse_launchers()
    recipe = load_recipe(options.recipe, options.overrides)
    require_inputs(recipe)
    if options.compare or options.fit_weights:
        return _compare(options, recipe)
    stop = StopOnSignal("stopping after the current batch; completed shards are kept")
    with loading(options) as listen, stop:
        from distcse.api import embed

        tables = embed(recipe, dry_run=options.dry_run, listen=listen, stop_requested=stop.stop_requested)
    if options.dry_run:
        line = "the dry run of this pass passed; leave out --dry-run to start it"
        return finish(options, [line], "Checked", recipe=options.recipe)
    folders = [None if table is None else to_uri(table) for table in tables]
    lines = ["", *(f"table   {folder}" for folder in folders if folder is not None)]
    return finish(options, lines, tables=folders)


def _compare(options: argparse.Namespace, recipe: Recipe) -> int:
    stop = StopOnSignal("stopping after the current batch; the dev sets' vectors are kept")
    with loading(options) as listen, stop:
        from distcse.api import compare
        from distcse.report.terminal import print_comparison, print_ensemble_scores

        comparison, scores = compare(
            recipe,
            sentences=options.sentences if options.compare else None,
            fit_weights=options.fit_weights,
            dry_run=options.dry_run,
            listen=listen,
            stop_requested=stop.stop_requested,
        )
    if options.dry_run:
        line = "the dry run of this comparison passed; leave out --dry-run to start it"
        return finish(options, [line], "Checked", recipe=options.recipe)
    if options.json:
        parts = {"Agreement": comparison, "EnsembleScores": scores}
        print_json([{"event": event, **asdict(part)} for event, part in parts.items() if part is not None])
        return 0
    if comparison is not None:
        print_comparison(comparison)
    if scores is not None:
        print_ensemble_scores(scores)
    return 0
