"""The command `distcse`: `distcse train …` is `python -m distcse.train …`; `distcse completion bash` prints its completion."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType

from distcse import __version__
from distcse.command import exit_status
from distcse.errors import CommandDependencyError, CommandLineError

COMMANDS = {
    "train": "train a student from a recipe, or resume a run",
    "tune": "search a recipe's parameters",
    "embed": "embed a corpus with a recipe's teachers, or compare the teachers",
    "evaluate": "evaluate models side by side",
    "pairs": "write a task's pairs for mutual distillation",
    "rank": "store a model with references, to score pairs by cosine and ranks",
    "export": "export a model to ONNX",
    "push": "upload a model to the Hugging Face hub",
    "plan": "estimate a run's time, memory and network traffic",
    "doctor": "check this machine, its cluster and a recipe's files",
    "recipe": "list, show and migrate recipes; print their reference and schemas",
}
_PACKAGE_COMMANDS = ("recipe",)
_COMPLETION = "completion"
_RECIPES = {
    "bash": '_distcse_recipes() { compgen -W "NAMES" -- "$1"; compgen -f -- "$1"; }',
    "zsh": "_distcse_recipes() { _alternative 'recipes:recipe:(NAMES)' 'files:file:_files'; }",
}
_RECIPE = dict.fromkeys(_RECIPES, "_distcse_recipes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first word names; without words, print the commands. Returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else ""
    if name in COMMANDS:
        status: int = _import_command(name).main(words[1:])
        return status
    if name == _COMPLETION:
        shell = _completion_parser().parse_args(words[1:]).shell
        return exit_status(lambda: _complete(shell), kept="nothing was written")
    if name and not name.startswith("-"):
        return exit_status(lambda: _refuse(name), kept="nothing was written")
    parser = _parser()
    parser.parse_args(words)
    parser.print_help()
    return 0


def _import_command(name: str) -> ModuleType:
    return import_module(f"distcse.{name}.__main__" if name in _PACKAGE_COMMANDS else f"distcse.{name}")


def _refuse(name: str) -> int:
    from distcse.recipe.validation_errors import nearest  # pydantic takes 0.3 s to import; --version does not need it

    known = [*COMMANDS, _COMPLETION]
    raise CommandLineError(f"no command {name!r}{nearest(name, known) or '; commands: ' + ', '.join(known)}")


def _complete(shell: str) -> int:
    """Print what a shell needs to complete commands, options, recipes and files."""
    from distcse.recipe import packaged_recipes

    try:
        import shtab
    except ImportError:
        raise CommandDependencyError('completion needs the package shtab; pip install "distcse[completion]"') from None
    parser = argparse.ArgumentParser(prog="distcse")
    commands = parser.add_subparsers()
    for name, about in COMMANDS.items():
        parent = _import_command(name).build_parser()
        command = commands.add_parser(name, help=about, parents=[parent], add_help=False)
        for action in _actions(command):
            if action.nargs != 0 and action.choices is None and action.dest != "overrides":
                action.complete = _RECIPE if action.dest == "recipe" else shtab.FILE  # type: ignore[attr-defined]
    names = " ".join(packaged_recipes())
    preamble = {shell: function.replace("NAMES", names) for shell, function in _RECIPES.items()}
    sys.stdout.write(shtab.complete(parser, shell, preamble=preamble) + "\n")
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """A parser's options and arguments, and those of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                yield from _actions(subcommand)
        else:
            yield action


def _parser() -> argparse.ArgumentParser:
    about = {**COMMANDS, _COMPLETION: "print the shell completion of bash or zsh"}
    listed = "\n".join(f"  {name:<10} {text}" for name, text in about.items())
    parser = argparse.ArgumentParser(
        prog="distcse",
        usage="distcse COMMAND …",
        description=f"Distil small sentence encoders from large ones.\n\ncommands:\n{listed}",
        epilog='distcse COMMAND --help shows its options. Completion: eval "$(distcse completion bash)" in ~/.bashrc.',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"distcse {__version__}")
    return parser


def _completion_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="distcse completion", description="Print the shell completion of distcse.")
    parser.add_argument("shell", choices=["bash", "zsh"])
    return parser


if __name__ == "__main__":
    sys.exit(main())
