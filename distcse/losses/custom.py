"""Custom loss terms."""

from __future__ import annotations

from torch import nn

from distcse.errors import CustomClassError
from distcse.recipe import CustomLossSection
from distcse.recipe.custom import load_class


def custom_loss(name: str, section: CustomLossSection) -> nn.Module:
    """Create a custom term: a module that is called with `Views` and `TeacherOutputs`, and returns this worker's share.

    Args:
        name: The term's key in `objective.custom`.
        section: Its settings.

    Raises:
        CustomClassError: The class cannot be imported or created, is not a module, or has parameters, which no optimizer
            would train.
    """
    key = f"objective.custom.{name}.class_path"
    term_class = load_class(section.class_path, key)
    if not issubclass(term_class, nn.Module):
        raise CustomClassError(f"{key} is {section.class_path}, which is not a torch.nn.Module; subclass it")
    try:
        term = term_class(**section.kwargs)
    except TypeError as error:
        raise CustomClassError(
            f"{key}: {section.class_path} does not accept objective.custom.{name}.kwargs: {error}"
        ) from None
    if any(True for _ in term.parameters()):
        raise CustomClassError(
            f"{key}: {section.class_path} has parameters, which no optimizer would train; remove them"
        )
    return term
