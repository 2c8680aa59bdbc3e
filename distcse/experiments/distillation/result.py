"""The result of a distillation run, and the student's model card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distcse.evaluation import Evaluation
from distcse.experiments.experiment import ReferenceModel
from distcse.experiments.model_card import ModelCard, hub_metadata, limits, usage
from distcse.model_source import shown_name
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory
from distcse.storage import to_uri
from distcse.teachers.kinds import kind_of
from distcse.teachers.targets import kept_by
from distcse.trainer.trainer import TrainResult

USE = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
vectors = model.encode(["A sentence.", "Another one."])"""
"""Code of the card's section Use."""


@dataclass(frozen=True)
class DistillationResult:
    """Result of a distillation run (see `Result`)."""

    recipe: Recipe
    """The recipe, with the settings that it left to the run decided."""
    directory: RunDirectory
    train_result: TrainResult
    evaluation: Evaluation | None
    """Evaluation of initial student, student and teachers, without those that a stop left out; None if nothing was measured."""
    rows: int
    """Number of sentences in the corpus."""
    interrupted: bool
    """Whether the run was asked to stop before its end, in training or in the final evaluation."""

    @property
    def models(self) -> dict[str, Path]:
        return {"student": self.directory.model}

    @property
    def is_start(self) -> bool:
        """Whether the student is as it began, because its best dev score is that before training."""
        best = self.train_result.state.best
        return best is not None and best[0] == 0

    @property
    def unchanged(self) -> list[str]:
        return ["student"] if self.is_start and not self.train_result.interrupted else []

    @property
    def reference(self) -> ReferenceModel | None:
        kinds = [kind_of(teacher, only_local=True) for teacher in self.recipe.teachers.encoders]
        return next((ReferenceModel("teacher", kind.section) for kind in kinds if kind.is_model), None)

    @property
    def summary(self) -> list[str]:
        note = "  (its start: no checkpoint is better)" if self.unchanged else ""
        return [f"model   {to_uri(self.directory.model)}{note}"]

    @property
    def cards(self) -> list[ModelCard]:
        recipe, projection = self.recipe, self.directory.projection
        card = ModelCard(
            model=self.directory.model,
            metadata=hub_metadata(
                recipe.student.backbone,
                "sentence-similarity",
                ["sentence-similarity", "feature-extraction"],
                self.rows,
            ),
            title=recipe.name,
            sections=[self._description(), usage(USE), self._teachers(), self._shared_space()],
            closing=[
                "## Recipe\n\nThe resolved recipe is in `distcse/recipe.yaml`; `python -m distcse.train distcse/recipe.yaml` "
                "repeats the run.",
                limits(
                    "The student is limited by its teachers and its corpus. The licences of corpus, backbone and teachers apply "
                    "to it."
                ),
            ],
            files=[projection] if projection.exists() else [],
        )
        return [card]

    def _description(self) -> str:
        student, state = self.recipe.student, self.train_result.state
        layers = f", layers {student.layers}" if student.layers else ""
        best = state.best
        dev = f" This is the checkpoint with the best dev score, {best[1]:.2f} at step {best[0]}." if best else ""
        if self.unchanged and best:
            dev = f" **Not improved**: no checkpoint has a higher dev score than its start, {best[1]:.2f}; this is the start."
        return (
            f"A sentence encoder, initialized from `{shown_name(student.backbone)}`{layers}, pooling `{student.pooling}`, "
            f"and trained on {self.rows:,} unlabelled sentences for {state.step} of {self.train_result.steps} steps.{dev}"
        )

    def _teachers(self) -> str:
        teachers = self.recipe.teachers.encoders
        if not teachers:
            return ""
        total = sum(teacher.alpha for teacher in teachers)
        rows = [
            f"| `{shown_name(teacher.backbone)}` | {teacher.alpha / total:.3f} | {teacher.pooling or 'as saved'} "
            f"| {teacher.max_length or 'as saved'} |"
            for teacher in teachers
        ]
        return "\n".join(["## Teachers", "", "| teacher | weight | pooling | tokens |", "|---|---|---|---|", *rows])

    def _shared_space(self) -> str:
        """Return which teachers' document embeddings the student can search, if it was trained on their vectors."""
        teachers = self.recipe.teachers.encoders
        chosen = [
            shown_name(teachers[number].backbone) for number in self.recipe.objective.vector_teachers(len(teachers))
        ]
        if not chosen:
            return ""
        named = " and ".join(f"`{backbone}`" for backbone in chosen)
        if self.directory.projection.exists():
            text = (
                f"Its vectors approximate those of {named}, each scaled by the root of its weight, concatenated, and multiplied "
                "by the matrix in `distcse/projection.safetensors`, which keeps "
                f"{kept_by(self.directory.projection):.1%} of the variance of their inner products. Use this model for queries "
                "on documents embedded this way."
            )
        else:
            text = f"Its vectors lie in the space of {named}. Use this model for queries on documents embedded by that model."
        return f"## Shared space\n\n{text}"
