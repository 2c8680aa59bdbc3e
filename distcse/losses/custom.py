"""Terms of the user's own."""

from __future__ import annotations

from torch import nn

from distcse.errors import CustomClassError
from distcse.recipe import CustomLossSection
from distcse.recipe.own import load_class


def custom_loss(name: str, section: CustomLossSection) -> nn.Module:
    """The term that a recipe names: a module that is called with `Views` and `TeacherOutputs` and gives this worker's share.

    Raises:
        RecipeError: It cannot be imported or made, is no module, or has weights: nothing would train them.
    """
    key = f"objective.custom.{name}.class_path"
    made = load_class(section.class_path, key)
    if not issubclass(made, nn.Module):
        raise CustomClassError(f"{key} is {section.class_path}, which is no torch.nn.Module")
    try:
        term = made(**section.kwargs)
    except TypeError as refused:
        raise CustomClassError(
            f"{key}: {section.class_path} does not take objective.custom.{name}.kwargs: {refused}"
        ) from None
    if any(True for _ in term.parameters()):
        raise CustomClassError(
            f"{key}: {section.class_path} has weights of its own, which no optimiser moves; keep a term without"
        )
    return term
