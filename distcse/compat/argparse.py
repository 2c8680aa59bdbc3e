"""Private names of argparse, of the standard library. Tried with Python 3.11 to 3.13."""

from __future__ import annotations

import argparse
from collections.abc import Mapping


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return a parser's options and arguments.

    Private: `ArgumentParser._actions`. The public methods add options, parse words with them and print them; none lists them.
    """
    return list(parser._actions)


def subcommands_of(action: argparse.Action) -> list[argparse.ArgumentParser]:
    """Return the parsers of an action's subcommands; none if it has none.

    Undocumented: `choices` of the action that `add_subparsers` returns maps names to parsers.
    """
    choices = action.choices if isinstance(action.choices, Mapping) else {}
    return [parser for parser in choices.values() if isinstance(parser, argparse.ArgumentParser)]
