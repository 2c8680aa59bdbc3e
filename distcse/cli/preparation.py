"""Commands before a run: recipe, plan, doctor and env."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from distcse.cli.shared import Commands, add_command, add_recipe_words, loading, program
from distcse.errors import ArgumentError, ClusterTooSmallError, RecipeNotFoundError, nearest
from distcse.report.progress import print_lines
from distcse.storage import open_store, resolve_path

SCHEMAS = ("recipe", "family", "mutual", "space")
"""Names in `distcse.recipe.schema.schema_documents`, whose import takes seconds that `--help` does not wait for."""
RECIPE_GROUPS = {
    "start here": ("quickstart", "search", "best-small", "three-teachers"),
    "search": ("search-code", "search-reranker"),
    "your teachers of today": ("search-three-teachers", "minilm-3layer"),
    "family: students of several sizes in one space": ("*-family",),
    "mutual: several students teach each other": ("minilm-mutual", "three-mutual"),
    "papers": ("*",),
}
"""Heading -> patterns of recipes' names; a recipe belongs to the first group with a pattern that it matches."""
_COLUMNS = 100
_MODELINE = "# yaml-language-server:"


def add_commands(commands: Commands) -> None:
    """Add the commands to the tree."""
    for add in (_add_recipe, _add_plan, _add_doctor, _add_env):
        add(commands)


def _add_recipe(commands: Commands) -> None:
    def show_help(options: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        subparser = subcommands.add_parser(name, help=help)
        subparser.set_defaults(run=run)
        return subparser

    parser = add_command(
        commands, "recipe", show_help, "Look at recipes, copy and check them.", "cp quickstart my-recipe.yaml"
    )
    subcommands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", title="commands")
    add("ls", _list_recipes, "list the packaged recipes, by need")
    show = add("show", _show_recipe, "print a packaged recipe")
    show.add_argument("recipe", metavar="NAME", help="a packaged recipe's name")
    copy = add("cp", _copy_recipe, "copy a packaged recipe to a file, as a start for yours")
    copy.add_argument("recipe", metavar="NAME", help="a packaged recipe's name")
    copy.add_argument("file", nargs="?", metavar="FILE", help="the file to write (default: NAME.yaml)")
    validate = add("validate", _validate_recipe, "check the keys and values of a recipe or search space; open nothing")
    validate.add_argument(
        "recipe", metavar="RECIPE", help="a packaged recipe's name, or the file of a recipe or search space"
    )
    validate.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that override the file's")
    add("reference", _print_reference, "print the reference of all keys, as Markdown")
    schema = add("schema", _print_schema, "print the JSON schema, for editors")
    schema.add_argument("kind", nargs="?", choices=SCHEMAS, default="recipe", help="kind of document (default: recipe)")


def _list_recipes(options: argparse.Namespace) -> int:
    from distcse.recipe import packaged_recipes

    titles = {name: _recipe_lines(name)[0].removeprefix("#").strip() for name in packaged_recipes()}
    for heading, patterns in RECIPE_GROUPS.items():
        names = [name for pattern in patterns for name in fnmatch.filter(titles, pattern)]
        sys.stdout.write(f"{heading}\n{_rows_of_recipes({name: titles.pop(name) for name in names})}\n")
    sys.stdout.write(f"copy one: {program('recipe')} cp NAME my-recipe.yaml\n")
    return 0


def _rows_of_recipes(titles: Mapping[str, str]) -> str:
    """Return a line for each recipe; variants, whose titles are equal up to a colon, are listed under that part."""
    variants: dict[str, list[str]] = {}
    for name, title in titles.items():
        variants.setdefault(title.partition(": ")[0], []).append(name)
    width = max((len(names[0]) for names in variants.values() if len(names) == 1), default=0)
    rows = []
    for title, names in variants.items():
        if len(names) == 1:
            rows.append(f"  {names[0]:<{width}}  {titles[names[0]]}\n")
        else:
            wrapped = textwrap.wrap("  ".join(names), _COLUMNS - 4, break_on_hyphens=False)
            rows += [f"  {title}\n", *(f"    {line}\n" for line in wrapped)]
    return "".join(rows)


def _recipe_lines(name: str) -> list[str]:
    """Read a packaged recipe without the modeline that gives editors the schema's path in the repository."""
    from distcse.recipe.loading import RECIPES_ARE_LISTED, packaged_recipes

    if name not in (known := packaged_recipes()):
        raise RecipeNotFoundError(f"no packaged recipe {name!r}{nearest(name, known)}; {RECIPES_ARE_LISTED}")
    text = files("distcse.recipes").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return [line for line in text.splitlines(keepends=True) if not line.startswith(_MODELINE)]


def _show_recipe(options: argparse.Namespace) -> int:
    sys.stdout.write("".join(_recipe_lines(options.recipe)))
    return 0


def _copy_recipe(options: argparse.Namespace) -> int:
    file = options.file or f"{options.recipe}.yaml"
    text, target = "".join(_recipe_lines(options.recipe)), resolve_path(file)
    store = open_store(target.parent)
    if store.fetch(target.name) or os.path.lexists(target):
        raise ArgumentError(f"{file} exists; write another name: {program('recipe')} cp {options.recipe} FILE")
    store.write_text(target.name, text)
    sys.stdout.write(f"written to {file}\ntrain   {program('train')} {file}\n")
    return 0


def _validate_recipe(options: argparse.Namespace) -> int:
    from distcse.recipe import Sweep
    from distcse.recipe.loading import read_document
    from distcse.recipe.section import settings_without_effect, unread_keys

    document = read_document(options.recipe, options.overrides)
    title = "search space" if isinstance(document, Sweep) else document.title
    warnings = settings_without_effect(document, unread_keys(document))
    sys.stdout.write(f"{options.recipe} is a valid {title}\n" + "".join(f"warning {line}\n" for line in warnings))
    return 0


def _print_reference(options: argparse.Namespace) -> int:
    from distcse.recipe.schema import reference

    sys.stdout.write(reference())
    return 0


def _print_schema(options: argparse.Namespace) -> int:
    from distcse.recipe.schema import schema_json

    sys.stdout.write(schema_json(options.kind))
    return 0


def _add_plan(commands: Commands) -> None:
    parser = add_command(
        commands,
        "plan",
        _plan,
        "What a recipe costs on given machines: time, memory, disk, the bottleneck, and how many GPUs are worth it; nothing is "
        "run without --measure.",
        "rankcse-listmle-bert-base --cluster 2x8xH100-80G --corpus-rows 1000000 --price 2.5",
    )
    add_recipe_words(parser)
    parser.add_argument(
        "--cluster",
        default="local",
        metavar="MACHINES",
        help="8xA100-40G, 2x8xH100-80G (nodes x GPUs), 2xcpu (machines like this one), or local (default)",
    )
    parser.add_argument(
        "--corpus-rows",
        type=int,
        metavar="N",
        help="sentences (or pairs) to plan for; default: those of the recipe's text",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of devices to compare; default: the powers of two up to the cluster's",
    )
    parser.add_argument("--price", type=float, metavar="MONEY", help="price of a device for an hour, to show costs")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run thirty steps on a sample of the recipe's text on this machine first, and plan with their times",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def _plan(options: argparse.Namespace) -> int:
    from distcse.planning.machines import parse_cluster
    from distcse.recipe import read_recipe

    # Mistakes that are known before PyTorch is imported.
    for name, numbers in (("--corpus-rows", [options.corpus_rows]), ("--gpus", options.gpus or [])):
        if any(number is not None and number < 1 for number in numbers):
            raise ArgumentError(f"{name} is {numbers}; write numbers from 1 on")
    if options.price is not None and not options.price > 0:
        raise ArgumentError(f"--price is {options.price:g}; write a price above 0")
    parse_cluster(options.cluster)
    recipe = read_recipe(options.recipe, options.overrides)
    with loading(options):
        from distcse.api import plan

        estimate = plan(
            recipe,
            cluster=options.cluster,
            corpus_rows=options.corpus_rows,
            gpus=options.gpus or [],
            measure=options.measure,
            price=options.price,
        )
    if options.json:
        described = {**estimate.described, "warnings": [vars(warning) for warning in estimate.warnings]}
        sys.stdout.write(json.dumps(described, indent=2) + "\n")
    else:
        warnings = [f"warning    {warning.text}" for warning in estimate.warnings]
        print_lines([*estimate.lines, *_trials_for_the_rest(options, estimate.described), *warnings])
    if estimate.problems:
        raise ClusterTooSmallError(f"this plan cannot be carried out: {estimate.problems[0]}")
    return 0


def _trials_for_the_rest(options: argparse.Namespace, described: Mapping[str, Any]) -> list[str]:
    """Return the command of a sweep with a trial on each device, where fewer devices are worth it for one run."""
    from distcse.recipe import packaged_spaces

    rows = described.get("scaling", [])
    devices = max((row["devices"] for row in rows), default=1)
    if not any(row["worth"] and row["devices"] < devices for row in rows):
        return []
    space = next((name for name in packaged_spaces() if options.recipe.startswith(name)), "SPACE")
    words = [options.recipe, "--space", space, *options.overrides, "training.workers=1"]
    return [f"the rest   {devices:,} trials at once, one a device: {program('tune')} {shlex.join(words)}"]


def _add_doctor(commands: Commands) -> None:
    parser = add_command(
        commands,
        "doctor",
        _doctor,
        "Look at Python, torch, GPUs, Ray, DeepSpeed, limits and storage, and at a recipe's models and text.",
        "my-recipe.yaml",
    )
    add_recipe_words(parser, optional=True)
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")


def _doctor(options: argparse.Namespace) -> int:
    from distcse.recipe import read_recipe

    recipe = None if options.recipe is None else read_recipe(options.recipe, options.overrides)
    with loading(options):
        from distcse.cluster.health import diagnose
    found = []
    for check in diagnose(recipe):
        found.append(check)
        if not options.json:
            print_lines([check.line])
    if options.json:
        sys.stdout.write(json.dumps([vars(check) for check in found], indent=2) + "\n")
    else:
        counts = {verdict: sum(check.verdict == verdict for check in found) for verdict in ("ok", "warn", "fail")}
        print_lines(["", ", ".join(f"{number} {verdict}" for verdict, number in counts.items())])
    return int(any(check.verdict == "fail" for check in found))


def _add_env(commands: Commands) -> None:
    parser = add_command(
        commands,
        "env",
        _env,
        "Print what a bug report needs: versions, devices, memory, Ray, and the variables that change a run. Secrets are not "
        "shown. `distcse doctor` also says what is wrong, and how to fix it.",
        "--json",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--constraints",
        action="store_true",
        help="print the tested versions of all packages instead, for pip install --constraint",
    )
    how.add_argument("--json", action="store_true", help="print one JSON object")


def _env(options: argparse.Namespace) -> int:
    if options.constraints:
        sys.stdout.write(files("distcse").joinpath("constraints.txt").read_text())
        return 0
    with loading(options):
        from distcse.cluster.health import check_cluster
        from distcse.preflight.machine import describe_environment

        found = describe_environment()
        found["ray cluster"] = "; ".join(check.found for check in check_cluster())
    if options.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        width = max(map(len, found))
        print_lines([f"{name:<{width}}  {value}" for name, value in found.items()])
    return 0
