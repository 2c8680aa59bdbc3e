"""The command `distcse`: `distcse train …` is `python -m distcse.train …`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from distcse import __version__
from distcse.command import exit_status
from distcse.commands import COMMANDS, GROUPS, USUAL_CALLS, import_command
from distcse.errors import ArgumentError
from distcse.spelling import nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first word names; without words, print the commands. Returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else ""
    if name in COMMANDS:
        status: int = import_command(name).main(words[1:])
        return status
    if name and not name.startswith("-"):
        return exit_status(lambda: _refuse(name), kept="nothing was written")
    parser = _parser()
    parser.parse_args(words)
    parser.print_help()
    return 0


def _refuse(name: str) -> int:
    raise ArgumentError(f"no command {name!r}{nearest(name, COMMANDS) or '; commands: ' + ', '.join(COMMANDS)}")


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parts = [f"{heading}:\n{_rows(commands, width)}" for heading, commands in GROUPS.items()]
    calls = _rows(USUAL_CALLS, max(map(len, USUAL_CALLS)))
    parser = argparse.ArgumentParser(
        prog="distcse",
        usage="distcse COMMAND …",
        description="\n\n".join(["Distil small sentence encoders from large ones.", *parts, f"usual calls:\n{calls}"]),
        epilog="distcse COMMAND --help shows a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"distcse {__version__}")
    return parser


def _rows(table: Mapping[str, str], width: int) -> str:
    return "\n".join(f"  {name:<{width}}  {about}" for name, about in table.items())


if __name__ == "__main__":
    sys.exit(main())
