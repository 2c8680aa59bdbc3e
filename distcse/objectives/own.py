"""Terms of the user's own."""

from __future__ import annotations

from torch import nn

from distcse.errors import RecipeError
from distcse.recipe import OwnTermSection
from distcse.recipe.own import load_class


def own_term(name: str, section: OwnTermSection) -> nn.Module:
    """The term that a recipe names: a module that is called with `Views` and `Taught` and gives this worker's share.

    Raises:
        RecipeError: It cannot be imported or made, is no module, or has weights: nothing would train them.
    """
    key = f"objective.own.{name}.code"
    made = load_class(section.code, key)
    if not issubclass(made, nn.Module):
        raise RecipeError(f"{key} is {section.code}, which is no torch.nn.Module")
    try:
        term = made(**section.knobs)
    except TypeError as refused:
        raise RecipeError(f"{key}: {section.code} does not take objective.own.{name}.knobs: {refused}") from None
    if any(True for _ in term.parameters()):
        raise RecipeError(
            f"{key}: {section.code} has weights of its own, which no optimiser moves; keep a term without"
        )
    return term
