"""Whether the hub has a recipe's models, before a run has a folder."""

from __future__ import annotations

from distcse.model_source import CONFIG_FILE, fetch_from_hub, is_hub_id
from distcse.models.folder import find_local_model
from distcse.recipe import BaseRecipe
from distcse.teachers.kinds import kind_of


def require_hub_models(recipe: BaseRecipe) -> None:
    """Check that a recipe's models are in the hub's cache, or on the hub, by fetching the configurations of those that are not.

    Raises:
        ModelNotFoundError: A model is missing.
    """
    inputs = recipe.inputs
    teachers = [section for section in inputs.teachers if kind_of(section, only_local=True).is_model]
    for name in dict.fromkeys(section.backbone for section in (*inputs.encoders, *teachers)):
        if is_hub_id(name) and find_local_model(name, wanted=[CONFIG_FILE]) is None:
            fetch_from_hub(name, [CONFIG_FILE], only_local=False)
