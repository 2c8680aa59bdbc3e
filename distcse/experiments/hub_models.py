"""Whether the hub has a recipe's models, before a run has a folder."""

from __future__ import annotations

from distcse.model_source import CONFIG_FILE, fetch_from_hub, is_hub_id
from distcse.recipe import BaseRecipe
from distcse.storage import is_uri
from distcse.teachers.kinds import kind_of


def require_hub_models(recipe: BaseRecipe) -> None:
    """Check that a recipe's models are on the hub, by fetching their configurations, or with HF_HUB_OFFLINE=1 in its cache.

    Raises:
        ModelNotFoundError: A model is missing.
    """
    inputs = recipe.inputs
    teachers = [
        kind.section for kind in (kind_of(section, only_local=True) for section in inputs.teachers) if kind.is_model
    ]
    for name in dict.fromkeys(section.backbone for section in (*inputs.encoders, *teachers)):
        if is_hub_id(name) and not is_uri(name):
            fetch_from_hub(name, [CONFIG_FILE], only_local=False)
