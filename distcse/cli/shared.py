"""What the commands share: their table, how they read words and call themselves, and how they load PyTorch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from distcse.devices.process import gc_paused
from distcse.errors import PATHS_BY_NAME, nearest
from distcse.report.progress import open_view, print_json, print_lines

if TYPE_CHECKING:
    from distcse.events import Listener

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What `ArgumentParser.add_subparsers` returns, whose class has no public name."""

GROUPS = {
    "train": {
        "train": "train a student from a recipe; resume or repeat a run",
        "tune": "search a recipe's parameters",
        "embed": "embed a corpus with a recipe's teachers, or compare the teachers",
        "data": "download labeled sets, or convert published files",
    },
    "look first": {
        "recipe": "list, copy and validate recipes; print their schemas",
        "plan": "estimate a run's time and memory",
        "doctor": "check this machine, its cluster and a recipe's files",
        "env": "print versions, devices, memory and Ray, for a bug report",
    },
    "on a cluster": {
        "submit": "submit a recipe's run to a cluster",
        "jobs": "list a cluster's jobs",
        "logs": "print or follow a job's log",
        "stop": "stop a job with a checkpoint",
    },
    "use a model": {
        "evaluate": "evaluate models side by side",
        "rank": "store a model with references, to score pairs by cosine and ranks",
        "export": "export a model to ONNX",
        "push": "upload a model to the Hugging Face hub",
    },
    "shell": {
        "completion": "print the completion of bash, zsh or fish",
    },
}
"""Command -> what it does, by heading."""
COMMANDS = {name: about for commands in GROUPS.values() for name, about in commands.items()}
USUAL_CALLS = {
    "distcse recipe cp best-small my-recipe.yaml": "a recipe to start from",
    "distcse train my-recipe.yaml corpus.path=text.txt": "train; key.path=value overrides any setting",
    "distcse evaluate student=RUN teacher=FOLDER --data data": "compare models",
}
"""The most usual calls -> what they are for."""
STATUSES = "Exit status: 0 done, 1 failed, 2 usage error, 3 no model is better than its start, 130 interrupted."

_MODULES = ("distcse.train", "distcse.tune")
"""Commands that are also modules for `python -m`."""
_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "fish": "(__fish_complete_path (commandline -ct))"}
"""shtab.FILE: shells complete files."""
_RECIPE_OPTIONS = ("config", "config_file", "cfg", "recipe")
"""Options by which other programs take their configuration file."""


def program(command: str) -> str:
    """Return how to call a command, in the form in which the user called this one: `distcse train`."""
    started = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "")
    if started in _MODULES and f"distcse.{command}" in _MODULES:
        return f"python -m distcse.{command}"
    return f"python -m distcse {command}" if started in (*_MODULES, "distcse.__main__") else f"distcse {command}"


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    description: str,
    example: str,
    kept: str = "nothing was written",
) -> argparse.ArgumentParser:
    """Add a command to the tree."""
    parser = commands.add_parser(
        name,
        prog=program(name),
        help=COMMANDS[name],
        description=description,
        epilog=f"Example: %(prog)s {example}. {STATUSES}",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, kept=kept)
    return parser


def add_recipe_words(
    parser: argparse.ArgumentParser, optional: bool = False, help: str = "values that override the recipe's"
) -> None:
    """Add the arguments `recipe` and `overrides`; `help` says what the overrides do."""
    recipe = parser.add_argument(
        "recipe", nargs="?" if optional else None, help="a packaged recipe's name, or a YAML file"
    )
    recipe.complete = _FILES  # type: ignore[attr-defined]
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help=help)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add `--quiet` and `--json` of commands that report events; others have a `--json` that prints one result."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-q", "--quiet", action="store_true", help="no progress: warnings and the results alone")
    how.add_argument(
        "--json", action="store_true", help="for programs: every event and result as JSON, one a line, on stdout"
    )


def add_start_options(parser: argparse.ArgumentParser, noun: str, checked: str) -> None:
    """Add `--dry-run`, `--run-id` and `--resume` to a command that starts a noun: `run` or `sweep`."""
    parser.add_argument("--dry-run", action="store_true", help=f"check {checked}; embed and train nothing")
    parser.add_argument(
        "--run-id",
        metavar="NAME",
        help=f"begin the {noun} NAME, or resume it if it has begun: the same command serves every start (storage.run_id)",
    )
    parser.add_argument(
        "--resume", metavar=noun.upper(), help=f"resume the {noun} in this directory, or at this address"
    )


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command's words; exit with status 2 and a hint at the right form for an unknown option or an empty value.

    Commands with overrides may have them before and after options.
    """
    for before, word in zip(["", *words], words, strict=False):
        option, _, value = word.partition("=") if word.startswith("--") and "=" in word else (before, "", word)
        if not value.strip() and option != "--prompt":
            name = option if option.startswith("-") else "an argument"
            parser.error(f"{name} is empty, such as an unset shell variable; write a value, or leave it out")
    takes_overrides = parser.get_default("overrides") is not None
    options, unknown = (parser.parse_known_intermixed_args if takes_overrides else parser.parse_known_args)(words)
    # An option with a space in its value is an argument to argparse.
    unknown += [word for word in getattr(options, "overrides", ()) if word.startswith("--")]
    if unknown:
        parser.error(_hint_at_option(parser, unknown, options))
    return options


def _hint_at_option(parser: argparse.ArgumentParser, unknown: Sequence[str], options: argparse.Namespace) -> str:
    """Describe what to write instead of the first of a command's unknown words."""
    option = next((word.partition("=")[0] for word in unknown if word.startswith("--")), None)
    if option is None or "subcommand" in options:
        return f"unrecognized arguments: {' '.join(unknown)}"
    known = [f"--{name.replace('_', '-')}" for name in vars(options).keys() - {"run", "kept"}]
    close, name = nearest(option, known, cutoff=0.75), option.removeprefix("--").replace("-", "_")
    if "recipe" in options and name in _RECIPE_OPTIONS:
        return f"no option {option}: the recipe is the first word; write {parser.prog} FILE"
    if "recipe" in options and ("." in name or name in PATHS_BY_NAME or not close):
        return f"no option {option}: settings are key.path=value; write {PATHS_BY_NAME.get(name, name)}=VALUE"
    return f"no option {option}{close}"


@contextmanager
def loading(options: argparse.Namespace, start: Callable[[], object] | None = None) -> Iterator[Listener]:
    """Context manager: show a command's events; say that PyTorch is being loaded, and load it with the API."""
    as_events = "quiet" in options and options.json
    quiet = options.quiet if "quiet" in options else options.json
    with open_view(quiet, as_events, is_loading=True) as view:
        if start is not None:
            start()
        with gc_paused():
            import distcse.api  # noqa: F401
        yield view.show


def finish(options: argparse.Namespace, lines: list[str], event: str = "Finished", **fields: object) -> int:
    """Print a command's result, as lines or as one JSON event, and return the exit status."""
    if options.json:
        print_json([{"event": event, **fields}])
    else:
        print_lines(lines)
    return 0
