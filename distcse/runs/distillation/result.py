"""The result of a distillation run, and the student's model card."""

from __future__ import annotations

from dataclasses import dataclass

from distcse.evaluation import Evaluation
from distcse.model_source import shown_name
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory
from distcse.runs.experiment import ReferenceModel, Result
from distcse.runs.model_card import USE, ModelCard, hub_metadata, limits, usage
from distcse.storage import to_uri
from distcse.teachers.kinds import kind_of
from distcse.teachers.targets import Projection
from distcse.training.trainer import TrainResult


@dataclass(frozen=True)
class StudentResult(Result):
    """Result of a distillation run."""

    recipe: Recipe
    train_result: TrainResult
    rows: int
    """Number of sentences in the corpus."""

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        directory: RunDirectory,
        train_result: TrainResult,
        evaluation: Evaluation | None,
        rows: int,
        interrupted: bool,
    ) -> StudentResult:
        """Describe a run whose student is exported."""
        is_unchanged = is_start(train_result) and not train_result.interrupted
        kinds = [kind_of(teacher, only_local=True) for teacher in recipe.teachers.encoders]
        note = "  (its start: no checkpoint is better)" if is_unchanged else ""
        return cls(
            recipe,
            directory,
            interrupted,
            evaluation,
            models={"student": directory.model},
            unchanged=["student"] if is_unchanged else [],
            reference=next((ReferenceModel("teacher", kind.section) for kind in kinds if kind.is_model), None),
            summary=[f"model   {to_uri(directory.model)}{note}"],
            cards=[_card(recipe, directory, train_result, rows)],
            train_result=train_result,
            rows=rows,
        )


def is_start(train_result: TrainResult) -> bool:
    """Return whether the student is as it began, because its best dev score is that before training."""
    best = train_result.state.best
    return best is not None and best[0] == 0


def _card(recipe: Recipe, directory: RunDirectory, train_result: TrainResult, rows: int) -> ModelCard:
    tags = ["sentence-similarity", "feature-extraction"]
    return ModelCard(
        model=directory.model,
        metadata=hub_metadata(recipe.student.backbone, "sentence-similarity", tags, rows),
        title=recipe.name,
        sections=[
            _description(recipe, train_result, rows),
            usage(USE),
            _teachers(recipe),
            _shared_space(recipe, directory),
        ],
        closing=[
            "## Recipe\n\nThe resolved recipe is in `distcse/recipe.yaml`; `python -m distcse.train distcse/recipe.yaml` "
            "repeats the run.",
            limits(
                "The student is limited by its teachers and its corpus. The licences of corpus, backbone and teachers apply "
                "to it."
            ),
        ],
        files=[directory.projection] if directory.projection.exists() else [],
    )


def _description(recipe: Recipe, train_result: TrainResult, rows: int) -> str:
    student, state = recipe.student, train_result.state
    layers = f", layers {student.layers}" if student.layers else ""
    best = state.best
    dev = f" This is the checkpoint with the best dev score, {best[1]:.2f} at step {best[0]}." if best else ""
    if best and is_start(train_result) and not train_result.interrupted:
        dev = (
            f" **Not improved**: no checkpoint has a higher dev score than its start, {best[1]:.2f}; this is the start."
        )
    return (
        f"A sentence encoder, initialized from `{shown_name(student.backbone)}`{layers}, pooling `{student.pooling}`, "
        f"and trained on {rows:,} unlabelled sentences for {state.step} of {train_result.steps} steps.{dev}"
    )


def _teachers(recipe: Recipe) -> str:
    teachers = recipe.teachers.encoders
    if not teachers:
        return ""
    total = sum(teacher.alpha for teacher in teachers)
    rows = [
        f"| `{shown_name(teacher.backbone)}` | {teacher.alpha / total:.3f} | {teacher.pooling or 'as saved'} "
        f"| {teacher.max_length or 'as saved'} |"
        for teacher in teachers
    ]
    return "\n".join(["## Teachers", "", "| teacher | weight | pooling | tokens |", "|---|---|---|---|", *rows])


def _shared_space(recipe: Recipe, directory: RunDirectory) -> str:
    """Return which teachers' document embeddings the student can search, if it was trained on their vectors."""
    teachers = recipe.teachers.encoders
    chosen = [shown_name(teachers[number].backbone) for number in recipe.objective.vector_teachers(len(teachers))]
    if not chosen:
        return ""
    named = " and ".join(f"`{backbone}`" for backbone in chosen)
    if directory.projection.exists():
        kept = Projection.read(directory.projection).kept
        text = (
            f"Its vectors approximate those of {named}, each scaled by the root of its weight, concatenated, and multiplied "
            "by the matrix in `distcse/projection.safetensors`, which keeps "
            f"{kept:.1%} of the variance of their inner products. Use this model for queries "
            "on documents embedded this way."
        )
    else:
        text = (
            f"Its vectors lie in the space of {named}. Use this model for queries on documents embedded by that model."
        )
    return f"## Shared space\n\n{text}"
