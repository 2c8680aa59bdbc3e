"""Check of a recipe's settings: the warnings that its run would report."""

from __future__ import annotations

from distcse.checks import Check, fail, ok, warn
from distcse.errors import DistcseError
from distcse.experiments.registry import experiment_of
from distcse.recipe import BaseRecipe


def check_settings(recipe: BaseRecipe) -> list[Check]:
    """Return the warnings of a run's settings, as `--dry-run` and the run itself report them."""
    try:
        warnings = experiment_of(recipe).warnings()
    except DistcseError as error:
        return [fail("settings", error.coded_message, "or correct the recipe")]
    if not warnings:
        return [ok("settings", "nothing to warn of")]
    return [warn("settings", f"[{warning.code}] {warning.problem}", warning.fix) for warning in warnings]
