"""Embed a corpus by a recipe's teachers, or compare them on it first: `python -m distcse.embed RECIPE [key.path=value …]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

from distcse.command import (
    STATUSES,
    StopOnSignal,
    add_output_options,
    add_recipe,
    exit_status,
    parse_command,
    program,
    refuse_launchers,
)
from distcse.gc_paused import gc_paused
from distcse.preflight.inputs import require_inputs
from distcse.recipe import Recipe, load_recipe
from distcse.storage import to_uri


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, embed or compare, print. Returns the exit status: 0 done, 1 failed, 2 a mistake in the recipe, 130 interrupted."""
    options = parse_command(build_parser(), arguments)
    return exit_status(lambda: _main(options), kept="completed shards are kept", as_json=options.json)


def _main(options: argparse.Namespace) -> int:
    refuse_launchers()
    recipe = load_recipe(options.recipe, options.overrides)
    require_inputs(recipe)
    if options.dry_run:
        return _check(recipe, options)
    return _compare(recipe, options) if options.compare or options.fit_weights else _embed(recipe, options)


def _embed(recipe: Recipe, options: argparse.Namespace) -> int:
    from distcse.events import Reporter
    from distcse.report.progress import open_view, print_json, print_lines

    with open_view(options.quiet, options.json, is_loading=True) as view:
        with gc_paused():
            from distcse.experiments.distillation.tables import embed_corpus
            from distcse.ray_backend.backend import choose_backend

        with (stop := StopOnSignal("stopping after the current batch; completed shards are kept")):
            tables = embed_corpus(recipe, choose_backend(recipe), Reporter(view.show, stop.stop_requested))
    folders = [None if table is None else to_uri(table.directory) for table in tables]
    if options.json:
        print_json([{"event": "Finished", "tables": folders}])
    else:
        print_lines(["", *(f"table   {folder}" for folder in folders if folder is not None)])
    return 0


def _check(recipe: Recipe, options: argparse.Namespace) -> int:
    """`--dry-run`."""
    from distcse.events import Reporter
    from distcse.report.progress import open_view, print_json, print_lines

    with open_view(options.quiet, options.json, is_loading=True) as view:
        with gc_paused():
            from distcse.experiments.distillation.dev_ensemble import require_labelled_dev
            from distcse.experiments.distillation.preflight import check_comparison, check_embedding
            from distcse.ray_backend.backend import choose_backend

        if options.fit_weights:
            require_labelled_dev(recipe)
        if options.compare or options.fit_weights:
            check_comparison(recipe, Reporter(view.show))
        else:
            check_embedding(recipe, choose_backend(recipe), Reporter(view.show))
    what = "comparison" if options.compare or options.fit_weights else "pass"
    if options.json:
        print_json([{"event": "Checked", "recipe": options.recipe}])
    else:
        print_lines([f"the dry run of this {what} passed; leave out --dry-run to start it"])
    return 0


def _compare(recipe: Recipe, options: argparse.Namespace) -> int:
    from distcse.events import Reporter
    from distcse.report.progress import open_view, print_json

    with ExitStack() as stack:
        view = stack.enter_context(open_view(options.quiet, options.json, is_loading=True))
        with gc_paused():
            from distcse.device import use_available_cpus
            from distcse.experiments.cluster_fit import gpu_policy
            from distcse.experiments.distillation.corpus import read_corpus
            from distcse.experiments.distillation.dev_ensemble import score_ensemble
            from distcse.experiments.distillation.processes import with_teacher_precisions
            from distcse.preflight.warnings import report_warnings, warn_of_narrow_bands
            from distcse.report.terminal import print_comparison, print_ensemble_scores
            from distcse.teachers.comparison import compare

        stop = StopOnSignal("stopping after the current batch; the dev sets' vectors are kept")
        stack.enter_context(stop)
        reporter = Reporter(view.show, stop.stop_requested)
        stack.enter_context(gpu_policy(recipe.gpu_mode, computes_here=True))
        use_available_cpus()
        recipe = with_teacher_precisions(recipe, None, reporter)
        comparison = None
        if options.compare:
            comparison = compare(recipe, read_corpus(recipe, reporter), options.sentences, reporter)
            statistics = {card.teacher: card.statistics for card in comparison.cards}
            report_warnings(warn_of_narrow_bands(recipe, statistics), reporter)
        scores = score_ensemble(recipe, options.fit_weights, reporter)
    if options.json:
        parts = {"Agreement": comparison, "EnsembleScores": scores}
        print_json([{"event": event, **asdict(part)} for event, part in parts.items() if part is not None])
        return 0
    if comparison is not None:
        print_comparison(comparison)
    if scores is not None:
        print_ensemble_scores(scores)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog=program("embed"),
        description="Embed a corpus once by every teacher of a recipe, for all later runs; or see first how far they agree.",
        epilog=f"Example: %(prog)s my-recipe.yaml --compare. {STATUSES}",
    )
    add_recipe(parser)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="embed a sample only: a card for each teacher, agreement of each two, and what the ensemble loses on the labelled "
        "dev sets without each",
    )
    parser.add_argument(
        "--fit-weights",
        action="store_true",
        help="fit the teachers' alpha to the ensemble's score on the labelled dev sets (evaluation.data), without a student",
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
    return parser


if __name__ == "__main__":
    sys.exit(main())
