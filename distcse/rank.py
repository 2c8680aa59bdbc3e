"""Score pairs by cosine and ranks (RankEncoder Eq. 7): `python -m distcse.rank RUN --corpus FILE --out FOLDER`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from distcse.command import STATUSES, add_output_options, exit_status, parse_command, program
from distcse.gc_paused import gc_paused
from distcse.storage import refuse_job_copy


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, encode the references, store, print. Returns the exit status: 0 done, 1 failed, 130 interrupted."""
    options = parse_command(build_parser(), arguments)
    return exit_status(lambda: _main(options), kept="nothing was written", as_json=options.json)


def _main(options: argparse.Namespace) -> int:
    refuse_job_copy("--out", options.out, "write --out /shared/FOLDER")
    from distcse.report.progress import open_view, print_json, print_lines

    with open_view(options.quiet, options.json, is_loading=True) as view:
        with gc_paused():
            from distcse.api import store_ranker

        references = store_ranker(
            options.model,
            options.corpus,
            options.out,
            column=options.column,
            num_references=options.references,
            weight=options.weight,
            normalize=not options.inner_product,
            rank_method=options.rank_method,
            pooling=options.pooling,
            emit=view.show,
        )
    if options.json:
        print_json([{"event": "Finished", "model": options.out, "references": references}])
    else:
        print_lines([f"model   {options.out}  ({references:,} references, λ = {options.weight:g})"])
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog=program("rank"),
        description="Store a bi-encoder with reference sentences, with which distcse.evaluate scores pairs by λ · Spearman + "
        "(1 - λ) · cosine (RankEncoder Eq. 7). Other tools load the folder as the bi-encoder alone.",
        epilog=f"Example: %(prog)s runs/my-run --corpus sentences.txt.gz --out my-ranker. {STATUSES}",
    )
    parser.add_argument("model", metavar="MODEL", help="a run's folder, a model's, or a name on the hub")
    parser.add_argument(
        "--corpus",
        action="append",
        required=True,
        metavar="FILE",
        help="sentences: .txt, .jsonl, .csv or .parquet; also repeated",
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the folder to write, or its address")
    parser.add_argument("--column", default="text", help="column of the sentences (default: text)")
    parser.add_argument(
        "--references", type=int, default=100_000, metavar="N", help="sentences drawn as references (default: 100000)"
    )
    parser.add_argument("--weight", type=float, default=0.1, metavar="λ", help="weight of the ranks (default: 0.1)")
    parser.add_argument(
        "--inner-product", action="store_true", help="rank by inner product, as the public code does, instead of cosine"
    )
    parser.add_argument(
        "--rank-method", choices=["sort", "histogram"], default="sort", help="exact, or faster with many references"
    )
    parser.add_argument("--pooling", help="for folders that do not say how they pool")
    add_output_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
