"""Make a model's ONNX file: `python -m distcse.export RUN --onnx [--int8]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from distcse.command import STATUSES, add_output_options, exit_status, parse_command, program
from distcse.gc_paused import gc_paused
from distcse.storage import refuse_job_copy


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, export, print. Returns the exit status: 0 done, 1 failed, 2 a mistake in what was asked, 130 interrupted."""
    options = parse_command(build_parser(), arguments)
    return exit_status(lambda: _main(options), kept="nothing was written", as_json=options.json)


def _main(options: argparse.Namespace) -> int:
    if options.out is not None or os.path.isdir(options.model):
        setting = "MODEL" if options.out is None else "--out"
        refuse_job_copy(setting, options.out or options.model, "write --out /shared/FOLDER")
    from distcse.report.progress import open_view, print_json, print_lines

    with open_view(options.quiet, options.json, is_loading=True) as view:
        with gc_paused():
            from distcse.api import describe_file, export_onnx

        exports = export_onnx(
            options.model,
            options.int8,
            options.out,
            options.data,
            view.show,
            pooling=options.pooling,
            prompt=options.prompt,
        )
    if options.json:
        files = [{**asdict(exported), "file": str(exported.file)} for exported in exports.files]
        print_json([{"event": "Finished", "opset": exports.opset, "files": files, "spearman": exports.spearman}])
        return 0
    print_lines([f"onnx    {exported.file}\n        {describe_file(exported)}" for exported in exports.files])
    if exports.spearman is not None:
        scores = [f"{exported.file.name} {exported.spearman:.2f}" for exported in exports.files]
        print_lines([f"STS-B dev  torch {exports.spearman:.2f}  {'  '.join(scores)}"])
    return 0


def build_parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog=program("export"),
        description="Write a model's ONNX file for onnxruntime, text-embeddings-inference, fastembed and transformers.js, "
        "after comparing its vectors with torch's.",
        epilog=f"Example: %(prog)s runs/my-run --onnx --int8 --data data. {STATUSES}",
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
    return parser


if __name__ == "__main__":
    sys.exit(main())
