"""Measure encoders: `python -m distcse.evaluate MODEL [MODEL …] --suite sts,ranking --data DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distcse.command import exit_status
from distcse.errors import EvaluationError
from distcse.events import Listener, Stage

if TYPE_CHECKING:
    from distcse.evaluation import Candidate, Reading, Tasks


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print. Returns the exit status: 0 done, 1 failed, 130 interrupted."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: _main(options), kept="nothing was written")


def _main(options: argparse.Namespace) -> int:
    # Torch and transformers take seconds to import; --help does not wait for them.
    import torch

    from distcse.evaluation import OwnSet, Protocol, Reading, collect, evaluate, named, open_candidate, suites_named
    from distcse.report.page import write_pages
    from distcse.report.terminal import open_view, print_evaluation, print_lines, print_remarks

    if options.mteb is not None:
        _check_mteb(options)
    models = named(options.models)
    own = [OwnSet.parse(text) for text in options.add]
    suites = suites_named(options.suite.split(",")) if options.data else []
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.out is not None:
        _make(options.out)
    with open_view() as view:
        protocol = Protocol(
            options.aggregate,
            options.transfer,
            device,
            lambda name, done: view.show(Stage(f"{name} fits", done, None, "done")),
        )
        tasks = collect(options.data, suites, own, protocol)
        reading = Reading(
            pooling=options.pooling,
            max_length=options.max_length,
            device=device,
            precision=options.precision,
            trust_remote_code=options.trust_remote_code,
            prompt=options.prompt,
        )
        candidates = [open_candidate(name, source, reading, _told(name, view.show)) for name, source in models.items()]
        if options.documents is not None:
            _search_in_index_of(options.documents, reading, tasks, candidates)
        settings = {
            "STS": options.aggregate,
            "transfer": options.transfer,
            "device": device,
            "precision": options.precision,
        }
        evaluation = evaluate(candidates, tasks, settings=settings, post=view.show)
    print_remarks(evaluation)
    print_evaluation(evaluation)
    if options.mteb is not None:
        from distcse.evaluation.mteb import write_results

        print_lines(["", f"written {write_results(candidates, options.data, options.mteb)}"])
    if options.out is not None:
        print_lines(["", *(f"written {file}" for file in write_pages(evaluation, options.out))])
    return 0


def _search_in_index_of(documents: str, reading: Reading, tasks: Tasks, candidates: Sequence[Candidate]) -> None:
    """Add each retrieval set once more, its documents encoded by one model whoever asks."""
    from distcse.evaluation import RetrievalTask, VectorModel, named, open_candidate

    ((name, source),) = named([documents]).items()
    model = open_candidate(name, source, reading).model
    if not isinstance(model, VectorModel):
        raise EvaluationError(f"--documents {source} gives no vectors; name a bi-encoder")
    sets = [task for task in tasks.tasks if isinstance(task, RetrievalTask)]
    if not sets:
        raise EvaluationError("--documents is about retrieval; add retrieval to --suite, or --add retrieval=FOLDER")
    some = sets[0].collection.documents[:1]
    width = model.vectors(some).shape[1]
    for candidate in candidates:
        if isinstance(candidate.model, VectorModel) and (own := candidate.model.vectors(some).shape[1]) != width:
            raise EvaluationError(
                f"{candidate.about.name} has {own} numbers a vector, {name} has {width}: they share no space. A student that "
                "was projected finds documents whose vectors were multiplied by its projection.safetensors"
            )
    tasks.tasks.extend(task.with_documents_by(name, model) for task in sets)


def _check_mteb(options: argparse.Namespace) -> None:
    """Before the work: MTEB's results need its package and a data folder."""
    import distcse.evaluation.mteb  # noqa: F401  (says what to install)

    if options.data is None:
        raise EvaluationError("--mteb measures the STS sets of a folder; give --data DIR")


def _told(name: str, show: Listener) -> Callable[[int, int], None]:
    return lambda done, total: show(Stage(name, done, total, "texts"))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise EvaluationError(f"cannot write to {folder}: {refused.strerror}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m distcse.evaluate",
        description="Measure sentence encoders by the protocols of the papers, side by side.",
        epilog="Example: python -m distcse.evaluate student=runs/my-run teacher=bert-large-nli --suite sts,ranking "
        "--data data --out report",
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="a run directory, a model folder, or a name on the hub; NAME=MODEL names it in tables; "
        "the others are compared with the first",
    )
    parser.add_argument(
        "--suite",
        default="sts",
        help="comma-separated: sts, transfer, pairs, ranking, geometry, retrieval (default: sts)",
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with the published sets (docs/evaluation.md)")
    parser.add_argument(
        "--add",
        action="append",
        default=[],
        metavar="SUITE[:NAME]=PATH",
        help="a set of your own: .tsv, .jsonl or .parquet; for transfer and retrieval also a folder",
    )
    parser.add_argument(
        "--documents",
        metavar="MODEL",
        help="measure retrieval also with documents encoded by this model and queries by each of the others (asymmetric)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write report.html, report.md and evaluation.json there"
    )
    parser.add_argument(
        "--mteb", type=Path, metavar="DIR", help="also write MTEB's own results of its STS tasks there (extra: mteb)"
    )
    parser.add_argument(
        "--aggregate", choices=["all", "mean", "wmean"], default="all", help="STS over a year's subsets"
    )
    parser.add_argument(
        "--transfer", choices=["strict", "fast"], default="strict", help="SentEval to the letter, or scikit-learn"
    )
    parser.add_argument("--pooling", help="for folders that do not say how they pool")
    parser.add_argument("--prompt", default="", help="put before every sentence, or a template with {sentence} in it")
    parser.add_argument("--max-length", type=int, metavar="TOKENS", help="tokens kept of a sentence")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that a model folder brings")
    return parser


if __name__ == "__main__":
    sys.exit(main())
