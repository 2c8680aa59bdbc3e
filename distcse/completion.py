"""Print a shell's completion of `distcse`: `distcse completion bash`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from distcse.command import exit_status, parse_command, program
from distcse.commands import COMMANDS, import_command
from distcse.errors import MissingDependencyError
from distcse.host import pip_install


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, print. Returns the exit status: 0 done, 2 a mistake in what was asked."""
    options = parse_command(build_parser(), arguments)
    return exit_status(lambda: _print(options.shell), kept="nothing was written")


def _print(shell: str) -> int:
    """Print what a shell needs to complete commands, options and their choices. Bash completes files elsewhere."""
    try:
        import shtab
    except ImportError:
        raise MissingDependencyError(f"completion needs the package shtab; {pip_install('completion')}") from None
    parser = argparse.ArgumentParser(prog="distcse")
    commands = parser.add_subparsers()
    for name, about in COMMANDS.items():
        commands.add_parser(name, help=about, parents=[import_command(name).build_parser()], add_help=False)
    sys.stdout.write(shtab.complete(parser, shell) + "\n")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog=program("completion"),
        description="Print a shell's completion of distcse: commands, options and their choices.",
        epilog='Example: eval "$(distcse completion bash)" in ~/.bashrc.',
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    return parser


if __name__ == "__main__":
    sys.exit(main())
