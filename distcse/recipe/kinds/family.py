"""Recipe of a family: students of several sizes that learn the same targets, and so lie in one space."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from distcse.recipe.base import register_recipe
from distcse.recipe.kinds.distillation import Recipe
from distcse.recipe.section import Name, Section
from distcse.recipe.training import TrainingSection


class MemberSection(Section):
    """One student of the family."""

    layers: Annotated[int, Field(ge=1)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = (
        None
    )
    """Layers of `student.backbone` to begin with: ascending indices, or their number, evenly spaced with the last one (`3` of six
    are 1, 3, 5; a first layer that differs, as in T5 and ModernBERT, is kept too)."""
    static: bool = False
    """One vector per token, no transformer. It begins with the largest student's vectors of single tokens and learns the same
    targets in model2vec, last and without checkpoints."""
    name: Name | None = None
    """Name in tables, and of its run's folder; null is its size, such as `3-layers` or `static`."""
    lr: Annotated[float, Field(gt=0, le=1)] | None = None
    """Peak learning rate; null is `training.lr`, and 1e-2 for a static student."""

    @property
    def depth(self) -> int:
        """Number of its layers; 0 for a static student."""
        return len(self.layers) if isinstance(self.layers, list) else self.layers or 0

    @property
    def label(self) -> str:
        """`name`, or the one that its size gives it."""
        size = "static" if self.static else f"{self.depth}-layer{'s' if self.depth > 1 else ''}"
        return self.name or size

    @model_validator(mode="after")
    def _has_one_size(self) -> Self:
        if self.static == (self.layers is not None):
            raise ValueError(
                "a student of the family has either layers or static: true; write {layers: 3} or {static: true}"
            )
        return self


@register_recipe
class FamilyRecipe(Recipe):
    """Students of several sizes, trained on the same targets and batches.

    On several GPUs they train [side by side](../methods/vector-targets.md#students-of-several-sizes-in-one-space). All other keys
    are those of a student's recipe, the same for each.
    """

    title: ClassVar[str] = "recipe of a family of students"
    schema_name: ClassVar[str] = "family"
    summary: ClassVar[str] = (
        "`python -m distcse.train RECIPE 'family=[{layers: 6}, {layers: 3}]'`: each student can search an index of another's "
        "vectors."
    )
    identifying_key: ClassVar[str] = "family"

    family: Annotated[list[MemberSection], Field(min_length=1)]
    """The students, at least one with layers, the largest of these first; `student.layers` is not read."""

    @property
    def model_folders(self) -> list[str]:
        return [f"members/{member.label}/model" for member in self.family]

    @property
    def largest_first(self) -> list[MemberSection]:
        """The students with layers, in the order in which they are trained."""
        return sorted((member for member in self.family if not member.static), key=lambda member: -member.depth)

    @property
    def static_members(self) -> list[MemberSection]:
        """The static students, which are trained after the others."""
        return [member for member in self.family if member.static]

    @property
    def gpus_of_a_student(self) -> float:
        """GPUs of the process of a student that trains next to others: one, or what the recipe sets."""
        return 1.0 if self.training.gpus_per_worker is None else self.training.gpus_per_worker

    @property
    def is_for_one_process(self) -> bool:
        """Whether one process with a GPU can train a student: no key sets more workers, or what only they and servers read."""
        training, teachers = self.training, self.teachers
        return (
            training.workers == 1
            and 0 < self.gpus_of_a_student <= 1
            and training.cpus_per_worker is None
            and training.max_failures == TrainingSection.model_fields["max_failures"].default
            and not training.needs_deepspeed
            and teachers.serve != "actor"
            and teachers.num_servers == 1
        )

    def student_recipe(self, member: MemberSection) -> Recipe:
        """Return the recipe of one student, whose layers are decided."""
        document = self.model_dump(mode="json", exclude={"family"})
        document["name"] = member.label
        document["student"]["layers"] = member.layers
        document["training"]["lr"] = member.lr or self.training.lr
        return Recipe.model_validate(document).with_given_keys(self.given_keys)

    @model_validator(mode="after")
    def _students_have_one_space(self) -> Self:
        labels = [member.label for member in self.family]
        if repeated := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"family has two students named {repeated}; give them names: {{layers: …, name: …}}")
        for number, member in enumerate(self.family):
            if isinstance(member.layers, list) and member.layers != sorted(set(member.layers)):
                raise ValueError(f"family.{number}.layers must ascend; write {sorted(set(member.layers))}")
        if not self.largest_first:
            raise ValueError(
                "family has static students only, which begin with another's vectors; add one with layers: {layers: 3}"
            )
        if not self.objective.keys_that_need("vectors", active=True):
            raise ValueError(
                "family needs targets that are vectors, which put its students into one space; write objective.regression: "
                "{weight: 1.0}, or train each student by itself"
            )
        if self.evaluation.rank_inference is not None:
            raise ValueError("evaluation.rank_inference belongs to one student; write evaluation.rank_inference: null")
        return self
