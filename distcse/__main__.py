"""All commands under one name: `distcse train …` is `python -m distcse.train …`; `distcse completion bash` completes them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from distcse.command import exit_status
from distcse.errors import RecipeError
from distcse.recipe import packaged_recipes

COMMANDS = {
    "train": "carry out a recipe, or go on with a run",
    "tune": "search a recipe's knobs",
    "embed": "embed a corpus by a recipe's teachers, or compare them",
    "evaluate": "measure models side by side",
    "export": "write a model's ONNX file",
    "push": "upload a model to the hub",
    "plan": "say what a run would cost, before it starts",
    "doctor": "look whether everything is there",
}
_RECIPES = {
    "bash": '_distcse_recipes() { compgen -W "NAMES" -- "$1"; compgen -f -- "$1"; }',
    "zsh": "_distcse_recipes() { _alternative 'recipes:recipe:(NAMES)' 'files:file:_files'; }",
}
_RECIPE = dict.fromkeys(_RECIPES, "_distcse_recipes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Hand the other words to the command that the first one names. Returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in COMMANDS:
        command = import_module(f"distcse.{words[0]}")
        status: int = command.main(words[1:])
        return status
    options = _parser().parse_args(words)
    return exit_status(lambda: _complete(options.shell), kept="nothing was written")


def _complete(shell: str) -> int:
    """Print what a shell needs to complete commands, options, recipes and files."""
    try:
        import shtab
    except ImportError:
        raise RecipeError('completion needs the package shtab; pip install "distcse[completion]"') from None
    whole = argparse.ArgumentParser(prog="distcse")
    commands = whole.add_subparsers()
    for name, about in COMMANDS.items():
        parent = import_module(f"distcse.{name}").build_parser()
        command = commands.add_parser(name, help=about, parents=[parent], add_help=False)
        for action in command._actions:
            if action.nargs != 0 and action.choices is None and action.dest != "overrides":
                action.complete = _RECIPE if action.dest == "recipe" else shtab.FILE  # type: ignore[attr-defined]
    names = " ".join(packaged_recipes())
    preamble = {shell: function.replace("NAMES", names) for shell, function in _RECIPES.items()}
    sys.stdout.write(shtab.complete(whole, shell, preamble=preamble) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<10} {about}" for name, about in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="distcse",
        description=f"Distil small sentence encoders.\n\n{listed}\n  completion print what bash or zsh need to complete these",
        epilog='distcse COMMAND --help says more. Completion: eval "$(distcse completion bash)" in ~/.bashrc.',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=[*COMMANDS, "completion"], metavar="COMMAND")
    parser.add_argument("shell", choices=["bash", "zsh"], help="of completion")
    return parser


if __name__ == "__main__":
    sys.exit(main())
