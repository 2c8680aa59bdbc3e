"""The command data: download labeled sets, and convert published files."""

from __future__ import annotations

import argparse
from pathlib import Path

from distcse.cli.shared import Commands, add_command, add_output_options, finish, loading
from distcse.events import Reporter
from distcse.storage import refuse_job_copy


def add_commands(commands: Commands) -> None:
    """Add the command to the tree."""

    def show_help(options: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser = add_command(
        commands,
        "data",
        show_help,
        "Write the labeled sets of evaluation, and Trans-Encoder's pairs, to a data folder.",
        "get sts beir:scifact --data data",
        kept="downloads and complete sets are kept, and the same command continues",
    )
    subcommands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", title="commands")
    get = subcommands.add_parser("get", help="download sets from their publishers and convert them")
    get.add_argument("sets", nargs="+", metavar="SET", help="sts and transfer (one archive), pairs, beir:NAME")
    get.add_argument("--from", dest="mirror", metavar="URL", help="a folder with the files, instead of the publishers'")
    convert = subcommands.add_parser("convert", help="convert the files of SentEval, GLUE and BEIR that a folder has")
    convert.add_argument("folder", type=Path, metavar="FOLDER", help="where the published archives were unpacked")
    for each in (get, convert):
        each.add_argument("--data", type=Path, default=Path("data"), metavar="DIR", help="data folder (default: data)")
        add_output_options(each)
        each.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    refuse_job_copy("--data", options.data, "write --data /shared/data")
    with loading(options) as listen:
        from distcse.evaluation.conversion import convert, published_rows
        from distcse.evaluation.downloads import get

        if options.subcommand == "get":
            done = get(options.sets, options.data, options.mirror, Reporter(listen))
        else:
            done = convert(options.folder, options.data, Reporter(listen))
    published = published_rows(options.data)
    lines = [
        *(f"kept      {folder}, which exists" for folder in done.kept),
        *(f"left out  {reason}" for reason in done.incomplete),
        *(
            f"{file}  {rows:,} rows" + (f" (published: {published[file]:,})" if file in published else "")
            for file, rows in done.written.items()
        ),
    ]
    files = [{"file": str(file), "rows": rows, "published": published.get(file)} for file, rows in done.written.items()]
    return finish(options, lines, files=files, kept=[*map(str, done.kept)], left_out=done.incomplete)
