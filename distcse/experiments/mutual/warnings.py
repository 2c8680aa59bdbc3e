"""The warnings of a mutual distillation's recipe: what the run, `--dry-run` and the doctor report of its settings."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.experiments.settings_warnings import SettingsWarning, warn_of_session_folders, warn_of_unused_prompts
from distcse.recipe import MutualRecipe


def settings_warnings(
    recipe: MutualRecipe, numbers: Sequence[int] | None = None, only_local: bool = False
) -> list[SettingsWarning]:
    """Return the warnings of a recipe.

    Args:
        recipe: The recipe.
        numbers: Numbers of the groups that are not dropped. Default: all.
        only_local: Skip models that would have to be downloaded. Default: False.
    """
    numbers = range(len(recipe.groups)) if numbers is None else numbers
    groups = {f"groups.{number}": recipe.groups[number] for number in numbers}
    return [*warn_of_session_folders(recipe.storage), *warn_of_unused_prompts(groups, only_local)]
