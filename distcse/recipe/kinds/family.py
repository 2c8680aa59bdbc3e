"""Recipe of a family: students of several sizes that learn the same targets, and so lie in one space."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from distcse.recipe.base import register_recipe
from distcse.recipe.kinds.distillation import Recipe
from distcse.recipe.section import Name, Section


class MemberSection(Section):
    """One student of the family."""

    layers: Annotated[int, Field(ge=1)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    """Layers of `student.backbone` that it begins with: their number, evenly spaced with the last one among them (`3` of six are
    1, 3, 5; a first layer that differs from the rest, as in T5 and ModernBERT, is kept too), or their indices, ascending."""
    name: Name | None = None
    """Name in tables, and of its run's folder. null: its number of layers, such as `3-layers`."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate; null takes `training.lr`."""

    @property
    def depth(self) -> int:
        """Number of its layers."""
        return self.layers if isinstance(self.layers, int) else len(self.layers)

    @property
    def label(self) -> str:
        """`name`, or the one that its layers give it."""
        return self.name or f"{self.depth}-layer{'s' if self.depth > 1 else ''}"


@register_recipe
class FamilyRecipe(Recipe):
    """Students of several sizes, trained one after the other on the same targets and batches.

    All other keys are those of a student's recipe, and are the same for each.
    """

    title: ClassVar[str] = "recipe of a family of students"
    schema_name: ClassVar[str] = "family"
    summary: ClassVar[str] = (
        "`python -m distcse.train RECIPE 'family=[{layers: 6}, {layers: 3}]'`: students of several sizes learn the same "
        "targets, and each can search an index of another's vectors."
    )
    identifying_key: ClassVar[str] = "family"

    family: Annotated[list[MemberSection], Field(min_length=1)]
    """The students. The largest is trained first; `student.layers` is not read."""

    @property
    def model_folders(self) -> list[str]:
        return [f"members/{member.label}/model" for member in self.family]

    @property
    def largest_first(self) -> list[MemberSection]:
        """The students in the order in which they are trained."""
        return sorted(self.family, key=lambda member: -member.depth)

    def student_recipe(self, member: MemberSection) -> Recipe:
        """Return the recipe of one student, whose layers are decided."""
        document = self.model_dump(mode="json", exclude={"family"})
        document["name"] = member.label
        document["student"] |= {"layers": member.layers, "num_layers": None}
        document["training"]["lr"] = member.lr or self.training.lr
        return Recipe.model_validate(document)

    @model_validator(mode="after")
    def _students_have_one_space(self) -> Self:
        labels = [member.label for member in self.family]
        if repeated := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"family has two students named {repeated}; give them names: {{layers: …, name: …}}")
        for number, member in enumerate(self.family):
            if isinstance(member.layers, list) and member.layers != sorted(set(member.layers)):
                raise ValueError(f"family.{number}.layers must ascend; write {sorted(set(member.layers))}")
        if not self.objective.keys_that_need("vectors", active=True):
            raise ValueError(
                "family needs targets that are vectors, which put its students into one space; write objective.regression: "
                "{weight: 1.0}, or train each student by itself"
            )
        if self.evaluation.rank_inference is not None:
            raise ValueError("evaluation.rank_inference belongs to one student; write evaluation.rank_inference: null")
        return self
