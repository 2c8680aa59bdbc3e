"""Settings of vector regression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field

from distcse.recipe.losses.loss_section import ClassAndArguments, LossSection, Needs, register_loss
from distcse.recipe.paths import absolute_location
from distcse.recipe.section import Weight

if TYPE_CHECKING:
    from distcse.recipe.kinds.distillation import Recipe
    from distcse.recipe.objective import ObjectiveSection


@register_loss(
    "regression",
    "Vector regression term, in addition to list terms or instead of them; needs teachers with tables.",
    order=5,
)
class RegressionSection(LossSection):
    """Regression of the student's vectors on the teachers' vectors (Stella and Jasper; LEAF)."""

    fixed_in_training = ("teachers", "projection")

    weight: Weight = 1.0
    """Weight of the term in the sum."""
    form: Literal["cosine", "mse"] = "cosine"
    """`cosine` is 1 - cos; `mse` is the squared distance, which also fits the norm."""
    teachers: list[Annotated[int, Field(ge=0)]] | None = None
    """Indices of the teachers whose vectors, weighted by alpha, are concatenated into the target; null takes all. A single
    teacher of the student's width is used unchanged; any other target is projected to the student's width."""

    projection: str | None = None
    """Run (folder, or address in object storage) whose projection is used: this student then lies in the same space as that
    run's, and searches its index. Text, teachers and their weights are the same, and the student has the same width. null fits
    a projection, rotated towards the student's initial vectors."""

    def term(self, objective: ObjectiveSection) -> ClassAndArguments:
        return "distcse.losses.regression:Regression", {"form": self.form}

    @property
    def needs(self) -> Needs:
        return {"vectors": ""}

    def vector_teachers(self, count: int) -> list[int]:
        return list(range(count)) if self.teachers is None else self.teachers

    @property
    def projection_of(self) -> str | None:
        return self.projection

    def with_absolute_paths(self) -> Self:
        return (
            self
            if self.projection is None
            else self.model_copy(update={"projection": absolute_location(self.projection)})
        )

    def check_recipe(self, recipe: Recipe) -> None:
        teachers, chosen = recipe.teachers.encoders, self.teachers
        if chosen is not None and (not chosen or len(set(chosen)) < len(chosen) or max(chosen) >= len(teachers)):
            raise ValueError(
                f"objective.regression.teachers is {chosen}; name some of the teachers 0 to {len(teachers) - 1}, each once"
            )
        if recipe.student.projection != "none":
            raise ValueError(
                "objective.regression moves the vectors that are used, and nothing may stand between; "
                "write student.projection: none"
            )
