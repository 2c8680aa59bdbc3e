"""The command line: one tree of commands. Each reads its options, calls the Python API, and prints what it returns.

`distcse train …`, `python -m distcse train …` and `python -m distcse.train …` are the same command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from distcse import __version__
from distcse.cli import data, embedding, jobs, models, preparation, training, tuning
from distcse.cli.shared import COMMANDS, GROUPS, USUAL_CALLS, Commands, add_command, parse
from distcse.cluster.cluster import shutdown_ray
from distcse.devices import host
from distcse.devices.process import exit_status
from distcse.errors import ArgumentError, MissingDependencyError, nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first word names; without words, print the commands. Returns the exit status (`STATUSES`)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    host.limit_spinning()
    tree, commands = build_parser()
    name = words[0] if words else ""
    if name in commands.choices:
        options = parse(commands.choices[name], words[1:])
        try:
            return exit_status(partial(options.run, options), options.kept, "quiet" in options and options.json)
        finally:
            shutdown_ray()
    if name and not name.startswith("-"):
        return exit_status(lambda: _refuse(name), kept="nothing was written")
    tree.parse_args(words)
    tree.print_help()
    return 0


def _refuse(name: str) -> int:
    raise ArgumentError(f"no command {name!r}{nearest(name, COMMANDS) or '; commands: ' + ', '.join(COMMANDS)}")


def build_parser() -> tuple[argparse.ArgumentParser, Commands]:
    """Build the tree of all commands; return it, and its commands, whose `choices` are parsers by name."""
    width = max(map(len, COMMANDS))
    parts = [f"{heading}:\n{_rows(commands, width)}" for heading, commands in GROUPS.items()]
    calls = _rows(USUAL_CALLS, max(map(len, USUAL_CALLS)))
    tree = argparse.ArgumentParser(
        prog="distcse",
        usage="distcse COMMAND …",
        description="\n\n".join(["Distill small sentence encoders from large ones.", *parts, f"usual calls:\n{calls}"]),
        epilog="distcse COMMAND --help shows a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tree.add_argument("--version", action="version", version=f"distcse {__version__}")
    commands = tree.add_subparsers(help=argparse.SUPPRESS)
    for part in (training, tuning, embedding, data, preparation, models, jobs):
        part.add_commands(commands)
    _add_completion(commands)
    return tree, commands


def _rows(table: Mapping[str, str], width: int) -> str:
    return "\n".join(f"  {name:<{width}}  {about}" for name, about in table.items())


def _add_completion(commands: Commands) -> None:
    parser = add_command(
        commands,
        "completion",
        _completion,
        "Print a shell's completion of distcse: commands, options and their choices.",
        "bash >> ~/.bashrc",
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])


def _completion(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise MissingDependencyError(f"completion needs the package shtab; {host.pip_install('completion')}") from None
    tree, commands = build_parser()
    commands.help = "what to do"  # shtab leaves out what help does not show
    sys.stdout.write(shtab.complete(tree, options.shell) + "\n")
    return 0
