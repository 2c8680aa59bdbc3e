"""Commands that take a model: evaluate, rank, export and push."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from distcse.cli.shared import Commands, add_command, add_output_options, finish, loading
from distcse.devices.process import INTERRUPTED, StopOnSignal
from distcse.errors import EvaluationResultError
from distcse.report.progress import open_view, print_json, print_lines
from distcse.storage import refuse_job_copy, resolve_path, to_uri

_ROLES: tuple[Literal["query", "document"], ...] = ("query", "document")
"""Roles with own prompts; named here because `--help` does not wait for the recipe's classes."""


def add_commands(commands: Commands) -> None:
    """Add the commands to the tree."""
    for add in (_add_evaluate, _add_rank, _add_export, _add_push):
        add(commands)


def _add_evaluate(commands: Commands) -> None:
    parser = add_command(
        commands,
        "evaluate",
        _evaluate,
        "Measure sentence encoders by the protocols of the papers, side by side.",
        "student=runs/my-run teacher=bert-large-nli --suite sts,ranking --data data --out report",
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="a run directory, a model folder, or a name on the hub; NAME=MODEL names it in tables; "
        "a NAME of several models, such as three seeds, has their mean in tables",
    )
    parser.add_argument(
        "--against",
        metavar="NAME",
        help="the model that the others are compared with (default: teacher, else the last one called teacher…, else the first)",
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
        help="your own texts without labels, one per line: agreement with the model that others are compared with, neighbors "
        "kept, and speed",
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
        "--dimensions",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="measure retrieval also with the first N dimensions of each model's vectors, such as 256 128 64",
    )
    parser.add_argument(
        "--quantize",
        nargs="+",
        choices=["int8", "binary"],
        default=[],
        help="measure retrieval also with quantized vectors, of all dimensions and of those named",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write report.html, report.md, scores.csv, scores.tex (LaTeX) and evaluation.json there",
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
    for role in _ROLES:
        parser.add_argument(
            f"--{role}-prompt",
            action="append",
            default=[],
            metavar="[NAME=]TEXT",
            help=f"the same, before each {role} of a retrieval set (default: the folder's)",
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


def _evaluate(options: argparse.Namespace) -> int:
    if options.out is not None:
        refuse_job_copy("--out", resolve_path(options.out), "write --out /shared/report")
    if options.out is not None and not options.dry_run:
        try:
            resolve_path(options.out).mkdir(parents=True, exist_ok=True)
        except OSError as refused:
            raise EvaluationResultError(f"cannot write to {options.out}: {refused.strerror}") from None
    stop = StopOnSignal("stopping after the current batch; the models measured so far are kept")
    with loading(options) as listen, stop:
        from distcse.api import evaluate
        from distcse.devices.device import default_device
        from distcse.evaluation import Limits, LoadOptions, parse_models, parse_prompts
        from distcse.report.terminal import choice_as_json, print_evaluation, print_remarks, results_as_json

        documents = [] if options.documents is None else [options.documents]
        names = [*parse_models(options.models), *parse_models(documents)]
        prompts = parse_prompts(options.prompt, names)
        typed = {role: getattr(options, f"{role}_prompt") for role in _ROLES}
        limits = Limits(options.max_ms, options.max_mb)
        measured = evaluate(
            options.models,
            options.data,
            options.suite.split(","),
            options.add,
            texts=options.texts,
            column=options.column,
            documents=options.documents,
            ensembles=options.ensemble,
            dimensions=options.dimensions,
            quantize=options.quantize,
            aggregate=options.aggregate,
            limits=limits,
            against=options.against,
            load_options=LoadOptions(
                pooling=options.pooling,
                max_length=options.max_length,
                device=options.device or default_device(),
                precision=options.precision,
                trust_remote_code=options.trust_remote_code,
                prompt=prompts.pop("", ""),
                prompts=prompts,
                role_prompts={role: parse_prompts(each, names, f"--{role}-prompt") for role, each in typed.items()},
            ),
            dry_run=options.dry_run,
            listen=listen,
            stop_requested=stop.stop_requested,
        )
    if options.dry_run:
        line = "the dry run of this measurement passed; leave out --dry-run to start it"
        return finish(options, [line], "Checked", models=options.models)
    if options.json:
        choice = [] if measured.choice is None else [choice_as_json(measured.choice)]
        print_json([*results_as_json(measured.evaluation), *choice])
    else:
        print_remarks(measured.evaluation)
        print_evaluation(measured.evaluation)
        if measured.choice is not None:
            print_lines(["", str(measured.choice)])
        elif limits:
            print_lines(["", "no score says which model is best within the limits; add a suite, such as --suite sts"])
    written = [] if options.out is None else measured.write(options.out)
    files = [to_uri(file) for file in written]
    finish(options, ["", *(f"written {file}" for file in files)] if files else [], written=files)
    return INTERRUPTED if stop.stop_requested() else 0


def _add_rank(commands: Commands) -> None:
    parser = add_command(
        commands,
        "rank",
        _rank,
        "Store a bi-encoder with reference sentences, with which distcse evaluate scores pairs by λ · Spearman + "
        "(1 - λ) · cosine (RankEncoder Eq. 7). Other tools load the folder as the bi-encoder alone.",
        "runs/my-run --corpus sentences.txt.gz --out my-ranker",
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


def _rank(options: argparse.Namespace) -> int:
    refuse_job_copy("--out", options.out, "write --out /shared/FOLDER")
    with loading(options) as listen:
        from distcse.api import rank

        references = rank(
            options.model,
            options.corpus,
            options.out,
            column=options.column,
            num_references=options.references,
            weight=options.weight,
            normalize=not options.inner_product,
            rank_method=options.rank_method,
            pooling=options.pooling,
            listen=listen,
        )
    line = f"model   {options.out}  ({references:,} references, λ = {options.weight:g})"
    return finish(options, [line], model=options.out, references=references)


def _add_export(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        _export,
        "Write a model's ONNX file for onnxruntime, text-embeddings-inference, fastembed and transformers.js, after comparing "
        "its vectors with torch's.",
        "runs/my-run --onnx --int8 --data data",
    )
    parser.add_argument("model", metavar="MODEL", help="a run's folder, a model's, or a name on the hub (with --out)")
    parser.add_argument("--onnx", action="store_true", required=True, help="the format: MODEL/onnx/model.onnx")
    parser.add_argument("--int8", action="store_true", help="also MODEL/onnx/model_quantized.onnx, a quarter as large")
    parser.add_argument("--data", type=Path, metavar="DIR", help="measure STS-B dev before and after, from this folder")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="a new folder for the files, with all of the model but its weights"
    )
    parser.add_argument("--pooling", help="for folders that do not say how they pool")
    parser.add_argument("--prompt", default="", help="put before every sentence, or a template with {sentence} in it")
    add_output_options(parser)


def _export(options: argparse.Namespace) -> int:
    if options.out is not None or os.path.isdir(options.model):
        setting = "MODEL" if options.out is None else "--out"
        refuse_job_copy(setting, options.out or options.model, "write --out /shared/FOLDER")
    with loading(options) as listen:
        from distcse.api import export

        exports = export(
            options.model,
            options.out,
            int8=options.int8,
            data=options.data,
            pooling=options.pooling,
            prompt=options.prompt,
            listen=listen,
        )
    lines = [f"onnx    {exported.file}\n        {exported.description}" for exported in exports.files]
    if exports.spearman is not None:
        scores = [f"{exported.file.name} {exported.spearman:.2f}" for exported in exports.files]
        lines.append(f"STS-B dev  torch {exports.spearman:.2f}  {'  '.join(scores)}")
    files = [{**asdict(exported), "file": str(exported.file)} for exported in exports.files]
    return finish(options, lines, opset=exports.opset, files=files, spearman=exports.spearman)


def _add_push(commands: Commands) -> None:
    parser = add_command(
        commands,
        "push",
        _push,
        "Upload a run's model to the Hugging Face hub: weights, tokenizer, card and recipe; no text, no checkpoints.",
        "runs/my-run --to me/my-student --license apache-2.0",
        kept="nothing or all was uploaded",
    )
    parser.add_argument("model", metavar="RUN", help="a run's folder, or a model's; or its address")
    parser.add_argument(
        "--to", required=True, metavar="USER/NAME", help="the model's name on the hub; made if it is new"
    )
    parser.add_argument("--private", action="store_true", help="a new model is seen by you alone")
    parser.add_argument(
        "--license", "--licence", dest="licence", metavar="ID", help="written into the card, such as apache-2.0"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be uploaded")
    add_output_options(parser)


def _push(options: argparse.Namespace) -> int:
    from distcse.hub import push

    with open_view(options.quiet, options.json) as view:
        sent = push(
            options.model,
            options.to,
            licence=options.licence,
            private=options.private,
            dry_run=options.dry_run,
            listen=view.show,
        )
    lines = [f"model   {sent.address}"]
    if sent.address is None:
        lines = [f"would upload {len(sent.files)} files, {sent.megabytes:.1f} MB, to {options.to}:"]
        lines += [f"  {name}" for name in sent.files]
    return finish(options, lines, files=sent.files, remarks=sent.remarks, address=sent.address)
