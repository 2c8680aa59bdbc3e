"""Settings of rank regression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from distcse.recipe.losses.loss_section import ClassAndArguments, LossSection, Needs, register_loss
from distcse.recipe.section import Weight

if TYPE_CHECKING:
    from distcse.recipe.objective import ObjectiveSection


@register_loss("rank_regression", "RankEncoder's term; needs teachers, which the paper has in rank space.", order=4)
class RankRegressionSection(LossSection):
    """Regression of the student's cosines on the teachers' rank-space similarities (RankEncoder Eq. 6)."""

    weight: Weight = 0.05
    """Weight λ of the term in the sum."""
    lower: Annotated[float, Field(ge=-2, le=2)] = 0.5
    """τl: exclude pairs below this similarity."""
    upper: Annotated[float, Field(ge=-2, le=2)] = 0.8
    """τu: exclude pairs above this similarity; 0.9999 excludes only the sentence itself."""
    student_similarity: Literal["cross_view", "same_view"] = "cross_view"
    """Cosine between a pair's different views, as in the public code, or between its first views."""

    @model_validator(mode="after")
    def _is_a_range(self) -> RankRegressionSection:
        if self.lower >= self.upper:
            raise ValueError(f"lower is {self.lower} and upper {self.upper}; no pair lies between them")
        return self

    def term(self, objective: ObjectiveSection) -> ClassAndArguments:
        same_view = self.student_similarity == "same_view"
        arguments = {"lower": self.lower, "upper": self.upper, "same_view": same_view}
        return "distcse.losses.rank_regression:RankRegression", arguments

    @property
    def needs(self) -> Needs:
        return {"lists": ""}
