"""Settings of a custom loss term."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from distcse.recipe.custom import ClassPath, CustomKwarg
from distcse.recipe.losses.loss_section import ClassAndArguments, LossSection
from distcse.recipe.section import Weight

if TYPE_CHECKING:
    from distcse.recipe.objective import ObjectiveSection


class CustomLossSection(LossSection):
    """A custom loss term ([how to write one](../how-to/extend.md))."""

    class_path: ClassPath
    """`module:Class`, importable on every worker of the run."""
    weight: Weight = 1.0
    """Weight of the term in the sum."""
    kwargs: dict[str, CustomKwarg] = Field(default_factory=dict)
    """Keyword arguments of the class's constructor."""

    def term(self, objective: ObjectiveSection) -> ClassAndArguments:
        return self.class_path, self.kwargs
