"""The warnings of a mutual distillation's recipe: what the run, `--dry-run` and the doctor report of its settings."""

from __future__ import annotations

from distcse.experiments.settings_warnings import SettingsWarning, warn_of_session_folders, warn_of_unused_prompts
from distcse.recipe import MutualRecipe


def settings_warnings(recipe: MutualRecipe, only_local: bool = False) -> list[SettingsWarning]:
    """Return the warnings of a recipe.

    Args:
        recipe: The recipe.
        only_local: Skip models that would have to be downloaded. Default: False.
    """
    groups = {f"groups.{number}": group for number, group in enumerate(recipe.groups)}
    return [*warn_of_session_folders(recipe.storage), *warn_of_unused_prompts(groups, only_local)]
