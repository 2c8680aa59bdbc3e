"""Measure encoders: `python -m distcse.evaluate MODEL [MODEL …] --suite sts,ranking --data DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distcse.command import INTERRUPTED, STATUSES, StopOnSignal, add_output_options, exit_status, parse_command, program
from distcse.errors import EvaluationResultError
from distcse.gc_paused import gc_paused
from distcse.storage import refuse_job_copy, resolve_path, to_uri


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print. Returns the exit status: 0 done, 1 failed, 2 a mistake in what was asked, 130 interrupted."""
    options = parse_command(build_parser(), arguments)
    return exit_status(lambda: _main(options), kept="nothing was written", as_json=options.json)


def _main(options: argparse.Namespace) -> int:
    for option, folder in (("--out", options.out), ("--mteb", options.mteb)):
        if folder is not None:
            refuse_job_copy(option, resolve_path(folder), f"write {option} /shared/report")
    if options.out is not None and not options.dry_run:
        _make(resolve_path(options.out))
    from distcse.report.progress import open_view, print_json, print_lines

    stop = StopOnSignal("stopping after the current batch; the models measured so far are kept")
    with open_view(options.quiet, options.json, is_loading=True) as view:
        with gc_paused():
            from distcse.api import check_measurement, measure
            from distcse.report.terminal import choice_as_json, print_evaluation, print_remarks, results_as_json

        inputs = _inputs(options)
        if options.dry_run:
            check_measurement(options.models, options.data, **inputs, listen=view.show)
        else:
            with stop:
                measured = measure(
                    options.models,
                    options.data,
                    **inputs,
                    aggregate=options.aggregate,
                    listen=view.show,
                    stop_requested=stop.stop_requested,
                )
    if options.dry_run:
        return _print_checked(options)
    if options.json:
        choice = [] if measured.choice is None else [choice_as_json(measured.choice)]
        print_json([*results_as_json(measured.evaluation), *choice])
    else:
        print_remarks(measured.evaluation)
        print_evaluation(measured.evaluation)
        if measured.choice is not None:
            print_lines(["", str(measured.choice)])
        elif inputs["limits"]:
            print_lines(["", "no score says which model is best within the limits; add a suite, such as --suite sts"])
    written = [options.mteb / "results"] if options.mteb is not None else []
    written += measured.write(options.out) if options.out is not None else []
    if options.json:
        print_json([{"event": "Finished", "written": [to_uri(file) for file in written]}])
    else:
        print_lines(["", *(f"written {to_uri(file)}" for file in written)] if written else [])
    return INTERRUPTED if stop.stop_requested() else 0


def _print_checked(options: argparse.Namespace) -> int:
    """Print the end of a dry run."""
    from distcse.report.progress import print_json, print_lines

    if options.json:
        print_json([{"event": "Checked", "models": options.models}])
    else:
        print_lines(["the dry run of this measurement passed; leave out --dry-run to start it"])
    return 0


def _inputs(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that `measure` and `check_measurement` share."""
    from distcse.device import default_device
    from distcse.evaluation import Limits, LoadOptions, parse_models, parse_prompts

    documents = [] if options.documents is None else [options.documents]
    prompt, prompts = parse_prompts(options.prompt, [*parse_models(options.models), *parse_models(documents)])
    return {
        "suites": options.suite.split(","),
        "add": options.add,
        "texts": options.texts,
        "column": options.column,
        "documents": options.documents,
        "mteb": options.mteb,
        "ensembles": options.ensemble,
        "limits": Limits(options.max_ms, options.max_mb),
        "load_options": LoadOptions(
            pooling=options.pooling,
            max_length=options.max_length,
            device=options.device or default_device(),
            precision=options.precision,
            trust_remote_code=options.trust_remote_code,
            prompt=prompt,
            prompts=prompts,
        ),
    }


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise EvaluationResultError(f"cannot write to {folder}: {refused.strerror}") from None


def build_parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog=program("evaluate"),
        description="Measure sentence encoders by the protocols of the papers, side by side.",
        epilog="Example: %(prog)s student=runs/my-run teacher=bert-large-nli --suite sts,ranking "
        f"--data data --out report. {STATUSES}",
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="a run directory, a model folder, or a name on the hub; NAME=MODEL names it in tables; "
        "the others are compared with the first; a NAME of several models, such as three seeds, has their mean in tables",
    )
    parser.add_argument(
        "--suite",
        default="sts",
        help="comma-separated: sts, transfer, pairs, ranking, geometry, retrieval (default: sts)",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder with the published sets (docs/how-to/evaluate.md)"
    )
    parser.add_argument(
        "--add",
        action="append",
        default=[],
        metavar="SUITE[:NAME]=PATH",
        help="a custom set: .tsv, .csv, .jsonl or .parquet; for transfer and retrieval also a folder",
    )
    parser.add_argument(
        "--texts",
        type=Path,
        metavar="FILE",
        help="your own texts without labels, one per line: agreement with the model called teacher, or else with the first, "
        "neighbors kept, and speed",
    )
    parser.add_argument(
        "--column", default="text", metavar="NAME", help="column of the texts in a table or JSON file (default: text)"
    )
    parser.add_argument(
        "--documents",
        metavar="MODEL",
        help="measure retrieval also with documents encoded by this model and queries by each of the others (asymmetric)",
    )
    parser.add_argument(
        "--ensemble",
        action="append",
        default=[],
        metavar="[NAME=]MODEL,MODEL",
        help="add a row: the mean of these models' similarities, by their names in tables; "
        "a NAME of several models is all of them, all is every model",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write report.html, report.md, scores.csv, scores.tex (LaTeX) and evaluation.json there",
    )
    parser.add_argument(
        "--mteb", type=Path, metavar="DIR", help="also write MTEB's own results of its STS tasks there (extra: mteb)"
    )
    parser.add_argument(
        "--aggregate", choices=["all", "mean", "wmean"], default="all", help="STS over a year's subsets"
    )
    parser.add_argument(
        "--max-ms",
        type=float,
        metavar="MS",
        help="name the best model that needs at most this long for one sentence on this device, with all threads",
    )
    parser.add_argument(
        "--max-mb",
        type=float,
        metavar="MB",
        help="name the best model whose weights take at most this much memory; with --max-ms, within both",
    )
    parser.add_argument("--pooling", help="for folders that do not say how they pool")
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="[NAME=]TEXT",
        help="put before every sentence, or a template with {sentence} in it; NAME=TEXT is for one model, by its name in tables",
    )
    parser.add_argument("--max-length", type=int, metavar="TOKENS", help="tokens kept of a sentence")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    parser.add_argument(
        "--precision",
        choices=["auto", "fp32", "bf16", "fp16"],
        default="auto",
        help="arithmetic of the forward passes; auto is bf16 where the device is fast at it, else fp32",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that a model folder brings")
    parser.add_argument("--dry-run", action="store_true", help="load the models and read the sets; measure nothing")
    add_output_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
