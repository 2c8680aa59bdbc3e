"""Print a shell's completion of `distcse`: `distcse completion bash`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from distcse.command import exit_status, parse_command, program
from distcse.commands import COMMANDS, import_command
from distcse.compat.argparse import actions_of, subcommands_of
from distcse.errors import CommandDependencyError

_RECIPES = {
    "bash": '_distcse_recipes() { compgen -W "WORDS" -- "$1"; compgen -f -- "$1"; }',
    "zsh": "_distcse_recipes() { _alternative 'recipes:recipe:(WORDS)' 'files:file:_files'; }",
    "fish": "function _distcse_recipes\n  printf '%s\\n' WORDS\n  __fish_complete_path (commandline -ct)\nend",
}
_KEYS = {
    "bash": '_distcse_keys() { compgen -W "WORDS" -- "$1"; }',
    "zsh": "_distcse_keys() { compadd -S '' -- WORDS; }",
    "fish": "function _distcse_keys\n  printf '%s\\n' WORDS\nend",
}
_EPILOGUE = {
    "bash": """
# No space after a key, whose value follows.
_distcse_without_space() {
  _shtab_distcse "$@"
  if [[ "${COMPREPLY[*]}" == *= ]]; then compopt -o nospace 2>/dev/null || :; fi
}
complete -o bashdefault -F _distcse_without_space distcse
"""
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, print. Returns the exit status: 0 done, 2 a mistake in what was asked."""
    options = parse_command(build_parser(), arguments)
    return exit_status(lambda: _print(options.shell), kept="nothing was written")


def _print(shell: str) -> int:
    """Print what a shell needs to complete commands, options, recipes, keys and files."""
    from distcse.recipe import packaged_recipes

    try:
        import shtab
    except ImportError:
        raise CommandDependencyError('completion needs the package shtab; pip install "distcse[completion]"') from None
    parser = argparse.ArgumentParser(prog="distcse")
    commands = parser.add_subparsers()
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, parents=[import_command(name).build_parser()], add_help=False)
        for action in _actions(command):
            if action.dest in ("recipe", "overrides"):
                # Behind an optional argument, shtab completes nothing else.
                action.nargs = None if action.dest == "recipe" else "*"
                kind = "recipes" if action.dest == "recipe" else "keys"
                complete = {**dict.fromkeys(("bash", "zsh"), f"_distcse_{kind}"), "fish": f"(_distcse_{kind})"}
            elif action.nargs == 0 or action.choices is not None:
                continue
            else:
                complete = shtab.FILE
            action.complete = complete  # type: ignore[attr-defined]
    words = {kind: " ".join(names) for kind, names in (("recipes", packaged_recipes()), ("keys", _keys()))}
    functions = [_RECIPES[shell].replace("WORDS", words["recipes"]), _KEYS[shell].replace("WORDS", words["keys"])]
    script = shtab.complete(parser, shell, preamble={shell: "\n".join(functions)})
    sys.stdout.write(f"{script}\n{_EPILOGUE.get(shell, '')}")
    return 0


def _keys() -> list[str]:
    """List the keys of recipes, with an equals sign; of a list, those of its first place."""
    from distcse.recipe.base import recipe_classes
    from distcse.recipe.key_paths import key_paths

    paths = {path for kind in recipe_classes() for path, has_sections in key_paths(kind) if not has_sections}
    return [f"{path.replace('*', '0')}=" for path in sorted(paths)]


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """A parser's options and arguments, and those of its subcommands."""
    for action in actions_of(parser):
        if subcommands := subcommands_of(action):
            for subcommand in subcommands:
                yield from _actions(subcommand)
        else:
            yield action


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog=program("completion"),
        description="Print a shell's completion of distcse: commands, options, recipes, keys and files.",
        epilog='Example: eval "$(distcse completion bash)" in ~/.bashrc.',
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    return parser


if __name__ == "__main__":
    sys.exit(main())
