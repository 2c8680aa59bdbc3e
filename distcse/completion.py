"""Print a shell's completion of `distcse`: `distcse completion bash`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from distcse.command import exit_status, parse_command, program
from distcse.commands import COMMANDS, import_command
from distcse.compat.argparse import actions_of, subcommands_of
from distcse.errors import CommandDependencyError
from distcse.host import pip_install

if TYPE_CHECKING:
    from pydantic import BaseModel

_NAMES = {
    "bash": '_distcse_KIND() { compgen -W "WORDS" -- "$1"; compgen -f -- "$1"; }',
    "zsh": "_distcse_KIND() { _alternative 'KIND:KIND:(WORDS)' 'files:file:_files'; }",
    "fish": "function _distcse_KIND\n  printf '%s\\n' WORDS\n  __fish_complete_path (commandline -ct)\nend",
}
"""Functions that complete the names of packaged files, and files."""
_KEYS = {
    "bash": '_distcse_KIND() { compgen -W "WORDS" -- "$1"; }',
    "zsh": "_distcse_KIND() { compadd -S '' -- WORDS; }",
    "fish": "function _distcse_KIND\n  printf '%s\\n' WORDS\nend",
}
"""Functions that complete keys."""
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
    from distcse.recipe import Sweep, packaged_recipes, packaged_spaces
    from distcse.recipe.base import recipe_classes
    from distcse.recipe.sweep import OVERRIDE_PREFIX

    try:
        import shtab
    except ImportError:
        raise CommandDependencyError(f"completion needs the package shtab; {pip_install('completion')}") from None
    parser = argparse.ArgumentParser(prog="distcse")
    commands = parser.add_subparsers()
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, parents=[import_command(name).build_parser()], add_help=False)
        for action in _actions(command):
            kind = {"recipe": "recipes", "space": "spaces", "overrides": "keys"}.get(action.dest)
            if kind is not None:
                # Behind an optional argument, shtab completes nothing else.
                action.nargs = "*" if kind == "keys" else None
                kind = "sweep_keys" if (kind, name) == ("keys", "tune") else kind
                complete = {**dict.fromkeys(("bash", "zsh"), f"_distcse_{kind}"), "fish": f"(_distcse_{kind})"}
            elif action.nargs == 0 or action.choices is not None:
                continue
            else:
                complete = shtab.FILE
            action.complete = complete  # type: ignore[attr-defined]
    keys = _keys(*recipe_classes())
    names = {"recipes": packaged_recipes(), "spaces": packaged_spaces()}
    functions = [_function(_NAMES[shell], kind, words) for kind, words in names.items()]
    functions.append(_function(_KEYS[shell], "keys", keys))
    of_sweeps = [f"{OVERRIDE_PREFIX}{key}" for key in _keys(Sweep) if not key.startswith("parameters.")]
    functions.append(_function(_KEYS[shell], "sweep_keys", [*keys, *of_sweeps]))
    script = shtab.complete(parser, shell, preamble={shell: "\n".join(functions)})
    sys.stdout.write(f"{script}\n{_EPILOGUE.get(shell, '')}")
    return 0


def _function(template: str, kind: str, words: Sequence[str]) -> str:
    return template.replace("KIND", kind).replace("WORDS", " ".join(words))


def _keys(*documents: type[BaseModel]) -> list[str]:
    """List the keys of documents, with an equals sign; of a list, those of its first place."""
    from distcse.recipe.key_paths import key_paths

    paths = {path for kind in documents for path, has_sections in key_paths(kind) if not has_sections}
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
