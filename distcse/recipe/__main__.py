"""Look at recipes, copy and check them: `distcse recipe ls | show | cp | validate | schema | reference`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.resources import files

from distcse.command import STATUSES, exit_status, parse_command, program
from distcse.errors import ArgumentError, RecipeNotFoundError
from distcse.recipe.loading import RECIPES_ARE_LISTED, packaged_recipes, read_document
from distcse.recipe.schema import reference, schema_documents, schema_json
from distcse.recipe.section import settings_without_effect, unread_keys
from distcse.recipe.sweep import Sweep
from distcse.spelling import nearest
from distcse.storage import open_store, resolve_path

_MODELINE = "# yaml-language-server:"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; without one, print the help. Returns the exit status: 0 done, 1 failed, 2 invalid input."""
    parser = build_parser()
    options = parse_command(parser, arguments)
    if options.subcommand is None:
        parser.print_help()
        return 0
    return exit_status(lambda: _run(options), kept="nothing was written")


def _run(options: argparse.Namespace) -> int:
    match options.subcommand:
        case "ls":
            text = _list()
        case "show":
            text = "".join(_lines(options.recipe))
        case "cp":
            text = _copy(options.recipe, options.file or f"{options.recipe}.yaml")
        case "validate":
            text = _validate(options.recipe, options.overrides)
        case "reference":
            text = reference()
        case _:
            text = schema_json(options.kind)
    sys.stdout.write(text)
    return 0


def _list() -> str:
    names = packaged_recipes()
    width = max(map(len, names))
    return "".join(f"{name:<{width}}  {_lines(name)[0].removeprefix('#').strip()}\n" for name in names)


def _lines(name: str) -> list[str]:
    """Read a packaged recipe without the modeline that gives editors the schema's path in the repository."""
    if name not in (known := packaged_recipes()):
        raise RecipeNotFoundError(f"no packaged recipe {name!r}{nearest(name, known)}; {RECIPES_ARE_LISTED}")
    text = files("distcse.recipes").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return [line for line in text.splitlines(keepends=True) if not line.startswith(_MODELINE)]


def _copy(name: str, file: str) -> str:
    text, target = "".join(_lines(name)), resolve_path(file)
    store = open_store(target.parent)
    if store.fetch(target.name) or os.path.lexists(target):
        raise ArgumentError(f"{file} exists; write another name: {program('recipe')} cp {name} FILE")
    store.write_text(target.name, text)
    return f"written to {file}\ntrain   {program('train')} {file}\n"


def _validate(name: str, overrides: Sequence[str]) -> str:
    document = read_document(name, overrides)
    title = "search space" if isinstance(document, Sweep) else document.title
    warnings = settings_without_effect(document, unread_keys(document))
    return "".join([f"{name} is a valid {title}\n", *(f"warning {line}\n" for line in warnings)])


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = argparse.ArgumentParser(
        prog=program("recipe"),
        description="Look at recipes, copy and check them.",
        epilog=f"Example: %(prog)s cp quickstart my-recipe.yaml. {STATUSES}",
    )
    commands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", title="commands")
    commands.add_parser("ls", help="list the packaged recipes")
    show = commands.add_parser("show", help="print a packaged recipe")
    show.add_argument("recipe", metavar="NAME", help="a packaged recipe's name")
    copy = commands.add_parser("cp", help="copy a packaged recipe to a file, as a start for yours")
    copy.add_argument("recipe", metavar="NAME", help="a packaged recipe's name")
    copy.add_argument("file", nargs="?", metavar="FILE", help="the file to write (default: NAME.yaml)")
    validate = commands.add_parser(
        "validate", help="check the keys and values of a recipe or search space; open nothing"
    )
    validate.add_argument(
        "recipe", metavar="RECIPE", help="a packaged recipe's name, or the file of a recipe or search space"
    )
    validate.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that override the file's")
    commands.add_parser("reference", help="print the reference of all keys, as Markdown")
    schema = commands.add_parser("schema", help="print the JSON schema, for editors")
    schema.add_argument(
        "kind", nargs="?", choices=list(schema_documents()), default="recipe", help="kind of document (default: recipe)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
