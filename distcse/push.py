"""Share a model on the hub: `python -m distcse.push RUN --to USER/NAME`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from distcse.command import STATUSES, add_output_options, exit_status, parse_command, program
from distcse.errors import HubUploadError
from distcse.storage import resolve_path


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, look through the folder, upload, print. Returns the exit status: 0 done, 1 failed, 130 interrupted."""
    options = parse_command(build_parser(), arguments)
    return exit_status(lambda: _main(options), kept="nothing or all was uploaded", as_json=options.json)


def _main(options: argparse.Namespace) -> int:
    from distcse.hub import prepare_upload, upload
    from distcse.report.progress import print_json, print_lines

    target = _hub_name(options.to)
    with tempfile.TemporaryDirectory() as folder:
        bundle = prepare_upload(resolve_path(options.model), Path(folder) / "model", options.licence)
        if not options.quiet:
            for line in bundle.remarks:
                sys.stderr.write(f"warning   {line}\n")
        address = None if options.dry_run else upload(bundle, target, options.private)
    if options.json:
        print_json([{"event": "Finished", "files": bundle.files, "remarks": bundle.remarks, "address": address}])
    elif address is None:
        lines = [f"would upload {len(bundle.files)} files, {bundle.megabytes:.1f} MB, to {target}:"]
        print_lines([*lines, *(f"  {name}" for name in bundle.files)])
    else:
        print_lines([f"model   {address}"])
    return 0


def _hub_name(name: str) -> str:
    from distcse.recipe.names import hub_id  # pydantic takes longer to import than --help should

    try:
        name = hub_id(name)
    except ValueError as error:
        raise HubUploadError(f"--to: {error}") from None
    if name.count("/") != 1 or not all(name.split("/")):
        raise HubUploadError(f"--to {name} is not a name on the hub; write USER/NAME")
    return name


def build_parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog=program("push"),
        description="Upload a run's model to the Hugging Face hub: weights, tokenizer, card and recipe; no text, no checkpoints.",
        epilog=f"Example: %(prog)s runs/my-run --to me/my-student --licence apache-2.0. {STATUSES}",
    )
    parser.add_argument("model", metavar="RUN", help="a run's folder, or a model's; or its address")
    parser.add_argument(
        "--to", required=True, metavar="USER/NAME", help="the model's name on the hub; made if it is new"
    )
    parser.add_argument("--private", action="store_true", help="a new model is seen by you alone")
    parser.add_argument("--licence", metavar="ID", help="written into the card, such as apache-2.0")
    parser.add_argument("--dry-run", action="store_true", help="show what would be uploaded")
    add_output_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
