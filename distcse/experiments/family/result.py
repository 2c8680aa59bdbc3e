"""The result of a family's run, with the cards of its students."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from distcse.evaluation import Evaluation
from distcse.experiments.distillation.result import USE, DistillationResult
from distcse.experiments.experiment import ReferenceModel
from distcse.experiments.family.static import MAX_ROWS
from distcse.experiments.model_card import ModelCard, hub_metadata, limits, usage
from distcse.model_source import shown_name
from distcse.recipe import FamilyRecipe
from distcse.runs.directory import RunDirectory
from distcse.storage import to_uri


@dataclass(frozen=True)
class FamilyResult:
    """Result of a family's run (see `Result`)."""

    recipe: FamilyRecipe
    """The recipe, with the settings that it left to the run decided."""
    directory: RunDirectory
    students: Mapping[str, DistillationResult]
    """Results of the students that were trained, by name, the largest first. A stop request interrupts them."""
    static: Mapping[str, Path]
    """Folders of the static students that were trained, by name."""
    evaluation: Evaluation | None
    """Evaluation of students and teachers, without those that a stop left out; None if nothing was measured."""
    interrupted: bool
    """Whether the run was asked to stop before its end."""

    @property
    def models(self) -> dict[str, Path]:
        return {name: result.directory.model for name, result in self.students.items()} | dict(self.static)

    @property
    def unchanged(self) -> list[str]:
        return [name for name, result in self.students.items() if result.unchanged]

    @property
    def reference(self) -> ReferenceModel | None:
        return next((result.reference for result in self.students.values()), None)

    @property
    def summary(self) -> list[str]:
        width = max(map(len, self.models), default=0)
        notes = dict.fromkeys(self.unchanged, "  (its start: no checkpoint is better)")
        return [
            f"model   {name:<{width}}  {to_uri(folder)}{notes.get(name, '')}" for name, folder in self.models.items()
        ]

    @property
    def cards(self) -> list[ModelCard]:
        trained = [
            replace(
                card,
                title=f"{self.recipe.name} {name}",
                sections=[*card.sections, self._siblings(name)],
                evaluated_as=name,
            )
            for name, result in self.students.items()
            for card in result.cards
        ]
        return [*trained, *(self._static_card(name, folder) for name, folder in self.static.items())]

    def _static_card(self, name: str, folder: Path) -> ModelCard:
        largest, result = next(iter(self.students.items()))
        rows = min(result.rows - self.recipe.evaluation.num_heldout, MAX_ROWS)
        backbone = self.recipe.student.backbone
        text = (
            f"A static sentence encoder: one vector per token of `{shown_name(backbone)}`, averaged over a text. It began with "
            f"the vectors that `{largest}` of the same run has for single tokens, and was trained by model2vec on the targets of "
            f"that student, with {rows:,} unlabelled sentences."
        )
        return ModelCard(
            model=folder,
            metadata=hub_metadata(backbone, "sentence-similarity", ["sentence-similarity", "static-embeddings"], rows),
            title=f"{self.recipe.name} {name}",
            sections=[text, usage(USE), self._siblings(name)],
            closing=[
                limits("It does not see the order of words. The licences of corpus, backbone and teachers apply to it.")
            ],
            evaluated_as=name,
        )

    def _siblings(self, name: str) -> str:
        """Return which other students' document embeddings this student can search."""
        in_space = [other for other, result in self.students.items() if not result.is_start] + [*self.static]
        others = " and ".join(f"`{other}`" for other in in_space if other != name)
        if not others or name not in in_space:
            return ""
        return (
            f"It is one of a family of students that learned the same targets: {others} of the same run lie in its space. "
            "Documents embedded by one of them can be searched with queries embedded by another."
        )
