"""Results of runs, and what they write about the models that they trained: the parts of a model card."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from distcse import __version__
from distcse.devices.host import PACKAGE
from distcse.errors import EncoderError, StorageError
from distcse.evaluation import Evaluation
from distcse.model_source import shown_name
from distcse.models import resolve_model
from distcse.recipe import BaseRecipe, EncoderSection, FamilyRecipe, MutualRecipe, Recipe
from distcse.runs.directory import RunDirectory
from distcse.runs.mutual.phase_store import Kind, Phase
from distcse.storage import is_uri, to_uri
from distcse.teachers.kinds import kind_of
from distcse.teachers.targets import Projection
from distcse.training.trainer import TrainResult

_INHERITED = ("language", "license", "license_name", "license_link")
"""Metadata that hold for a model because they hold for its initial model."""
_USE = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
vectors = model.encode(["A sentence.", "Another one."])"""
_USE_CROSS = """from sentence_transformers import CrossEncoder

model = CrossEncoder("path/to/this/folder")
scores = model.predict([("A sentence.", "Another one.")])"""
MAX_STATIC_ROWS = 1_000_000
"""Rows of the corpus, evenly spaced, that a static student learns from at most: they are in memory at once."""


@dataclass(frozen=True)
class ReferenceModel:
    """A model that was not trained, next to which the trained ones are evaluated."""

    name: str
    """Name in tables."""
    section: EncoderSection
    """Where it is, and how it pools."""


@dataclass(frozen=True)
class ModelCard:
    """The card of one model, without its scores: the report adds those of the run's evaluation."""

    model: Path
    """The model's folder."""
    metadata: Mapping[str, Any]
    """The hub's metadata, for the front matter."""
    title: str
    sections: Sequence[str]
    """Markdown before the scores; empty sections are left out."""
    closing: Sequence[str]
    """Markdown after the scores."""
    files: Sequence[Path] = ()
    """Files of the run to copy into the model's folder `distcse/`."""
    evaluated_as: str = "student"
    """The model's name in the run's evaluation, whose scores become metadata."""


@dataclass(frozen=True)
class Result:
    """Result of a run, of any kind."""

    recipe: BaseRecipe
    """The recipe, with the settings that it left to the run decided."""
    directory: RunDirectory
    """The run's folder."""
    interrupted: bool
    """Whether the run was asked to stop before its end."""
    evaluation: Evaluation | None
    """Scores on the test sets, without the models that a stop left out; None if nothing was measured."""
    models: Mapping[str, Path]
    """Folders of the trained models, by name."""
    unchanged: Sequence[str]
    """Names of the models that are their start, because training found no better dev score."""
    reference: ReferenceModel | None
    """A model to compare the trained ones with, such as the teacher; None if there is none."""
    summary: Sequence[str]
    """Lines for the terminal: the models and what happened to them."""
    cards: Sequence[ModelCard]
    """Cards of the trained models."""


def hub_metadata(backbone: str, pipeline: str, tags: Sequence[str], rows: int) -> dict[str, Any]:
    """Return the hub's metadata of a model."""
    return {
        "library_name": "sentence-transformers",
        "pipeline_tag": pipeline,
        "tags": ["sentence-transformers", *tags, "distillation", "distcse", f"dataset_size:{rows}"],
        **base_model(backbone),
        **inherited_metadata(backbone),
    }


def inherited_metadata(backbone: str) -> dict[str, Any]:
    """Return license and language of an initial model, from the card in its folder; empty without one on this machine."""
    try:
        card = resolve_model(backbone, only_local=True) / "README.md"
    except (EncoderError, StorageError):
        return {}
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    head, separator, _ = text.removeprefix("---\n").partition("\n---")
    if not text.startswith("---\n") or not separator:
        return {}
    try:
        metadata = yaml.safe_load(head)
    except yaml.YAMLError:  # somebody else's card; ours is valid without it
        return {}
    return {key: metadata[key] for key in _INHERITED if key in metadata} if isinstance(metadata, dict) else {}


def base_model(backbone: str) -> dict[str, str]:
    """Return the hub's `base_model` metadata; empty if the initial model is not from the hub."""
    outside_hub = os.path.isabs(backbone) or is_uri(backbone) or backbone.startswith(PACKAGE)
    return {} if outside_hub else {"base_model": backbone}


def limits(text: str) -> str:
    """Return the section about limits and licenses, with distcse's version."""
    return f"## Limits\n\n{text} Made by distcse {__version__}."


def _usage(code: str) -> str:
    return f"## Use\n\n```python\n{code}\n```"


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
        best = None if evaluation is None else evaluation.base
        compared = sorted(
            kinds, key=lambda kind: best != f"teacher {kinds.index(kind)}"
        )  # the best teacher, then the others
        note = "  (its start: no checkpoint is better)" if is_unchanged else ""
        return cls(
            recipe,
            directory,
            interrupted,
            evaluation,
            models={"student": directory.model},
            unchanged=["student"] if is_unchanged else [],
            reference=next((ReferenceModel("teacher", kind.section) for kind in compared if kind.is_model), None),
            summary=[f"model   {to_uri(directory.model)}{note}"],
            cards=[_student_card(recipe, directory, train_result, rows)],
            train_result=train_result,
            rows=rows,
        )


def is_start(train_result: TrainResult) -> bool:
    """Return whether the student is as it began, because its best dev score is that before training."""
    best = train_result.state.best
    return best is not None and best[0] == 0


def _student_card(recipe: Recipe, directory: RunDirectory, train_result: TrainResult, rows: int) -> ModelCard:
    tags = ["sentence-similarity", "feature-extraction"]
    return ModelCard(
        model=directory.model,
        metadata=hub_metadata(recipe.student.backbone, "sentence-similarity", tags, rows),
        title=recipe.name,
        sections=[
            _training_of(recipe, train_result, rows),
            _usage(_USE),
            _teachers(recipe),
            _shared_space(recipe, directory),
        ],
        closing=[
            "## Recipe\n\nThe resolved recipe is in `distcse/recipe.yaml`; `python -m distcse.train distcse/recipe.yaml` "
            "repeats the run.",
            limits(
                "The student is limited by its teachers and its corpus. The licenses of corpus, backbone and teachers apply "
                "to it."
            ),
        ],
        files=[directory.projection] if _projects_targets(recipe, directory) else [],
    )


def _training_of(recipe: Recipe, train_result: TrainResult, rows: int) -> str:
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
        f"and trained on {rows:,} unlabeled sentences for {state.step} of {train_result.steps} steps.{dev}"
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


def _projects_targets(recipe: Recipe, directory: RunDirectory) -> bool:
    return directory.projection.exists() and recipe.student.index_of is None


def _shared_space(recipe: Recipe, directory: RunDirectory) -> str:
    """Return which teachers' document embeddings the student can search, if it was trained on their vectors."""
    teachers = recipe.teachers.encoders
    chosen = [shown_name(teachers[number].backbone) for number in recipe.objective.vector_teachers(len(teachers))]
    if not chosen:
        return ""
    named = " and ".join(f"`{backbone}`" for backbone in chosen)
    if _projects_targets(recipe, directory):
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


def family_result(
    recipe: FamilyRecipe,
    directory: RunDirectory,
    students: Mapping[str, StudentResult],
    static: Mapping[str, Path],
    evaluation: Evaluation | None,
    interrupted: bool,
) -> Result:
    """Describe a family's run: `static` has the folders of its static students by name."""
    models = {name: result.directory.model for name, result in students.items()} | dict(static)
    unchanged = [name for name, result in students.items() if result.unchanged]
    width = max(map(len, models), default=0)
    notes = dict.fromkeys(unchanged, "  (its start: no checkpoint is better)")
    in_space = [name for name, result in students.items() if not is_start(result.train_result)] + [*static]
    cards = [
        replace(
            card,
            title=f"{recipe.name} {name}",
            sections=[*card.sections, _siblings(name, in_space)],
            evaluated_as=name,
        )
        for name, result in students.items()
        for card in result.cards
    ]
    return Result(
        recipe,
        directory,
        interrupted,
        evaluation,
        models,
        unchanged,
        next((result.reference for result in students.values()), None),
        [f"model   {name:<{width}}  {to_uri(folder)}{notes.get(name, '')}" for name, folder in models.items()],
        [*cards, *(_static_card(recipe, students, name, folder, in_space) for name, folder in static.items())],
    )


def _static_card(
    recipe: FamilyRecipe, students: Mapping[str, StudentResult], name: str, folder: Path, in_space: Sequence[str]
) -> ModelCard:
    largest, result = next(iter(students.items()))
    rows = min(result.rows - recipe.evaluation.num_heldout, MAX_STATIC_ROWS)
    backbone = recipe.student.backbone
    text = (
        f"A static sentence encoder: one vector per token of `{shown_name(backbone)}`, averaged over a text. It began with "
        f"the vectors that `{largest}` of the same run has for single tokens, and was trained by model2vec on the targets of "
        f"that student, with {rows:,} unlabeled sentences."
    )
    return ModelCard(
        model=folder,
        metadata=hub_metadata(backbone, "sentence-similarity", ["sentence-similarity", "static-embeddings"], rows),
        title=f"{recipe.name} {name}",
        sections=[text, _usage(_USE), _siblings(name, in_space)],
        closing=[
            limits("It does not see the order of words. The licenses of corpus, backbone and teachers apply to it.")
        ],
        evaluated_as=name,
    )


def _siblings(name: str, in_space: Sequence[str]) -> str:
    """Return which other students' document embeddings a student can search."""
    others = " and ".join(f"`{other}`" for other in in_space if other != name)
    if not others or name not in in_space:
        return ""
    return (
        f"It is one of a family of students that learned the same targets: {others} of the same run lie in its space. "
        "Documents embedded by one of them can be searched with queries embedded by another."
    )


@dataclass(frozen=True)
class Best:
    """The best model of one group and formulation over all cycles."""

    group: str
    kind: Kind
    phase: Phase
    """The phase that trained the model."""
    dev: float | None
    """Its dev score; None without dev pairs."""
    model: Path
    """Its folder."""

    @property
    def name(self) -> str:
        """Its name in tables, such as `bert cross`."""
        return f"{self.group} {self.kind}"


@dataclass(frozen=True)
class MutualResult(Result):
    """Result of a mutual distillation."""

    recipe: MutualRecipe
    best: Sequence[Best]
    """The best models; empty if the run was interrupted before the last phase ended."""
    dropped: Mapping[str, str]
    """Groups that failed and were dropped, with the reason."""
    pairs: int
    """Number of pairs."""

    @classmethod
    def of(
        cls,
        recipe: MutualRecipe,
        directory: RunDirectory,
        best: Sequence[Best],
        dropped: Mapping[str, str],
        pairs: int,
        interrupted: bool,
        evaluation: Evaluation | None,
    ) -> MutualResult:
        """Describe a run whose best models are saved."""
        summary = []
        for model in best:
            dev = "" if model.dev is None else f"  dev {model.dev:.2f}"
            summary.append(f"{model.group} {model.kind:<5}  {to_uri(model.model)}  (cycle {model.phase.cycle}{dev})")
        return cls(
            recipe,
            directory,
            interrupted,
            evaluation,
            models={model.name: model.model for model in best},
            unchanged=[],
            reference=ReferenceModel("start", recipe.groups[0]),
            summary=[*summary, *(f"dropped  {group}: {why}" for group, why in dropped.items())],
            cards=[_group_card(recipe, model, dropped, pairs) for model in best],
            best=best,
            dropped=dropped,
            pairs=pairs,
        )


def _group_card(recipe: MutualRecipe, best: Best, dropped: Mapping[str, str], pairs: int) -> ModelCard:
    group = next(group for group in recipe.groups if group.name == best.group)
    is_cross, task = best.kind == "cross", recipe.pairs.task
    kind, start = ("cross-encoder", recipe.cross_start(group)) if is_cross else ("bi-encoder", group.backbone)
    transductive = (
        f"**Transductive**: its pairs are those of the task `{task}`, including the test pairs (without their labels). Do "
        "not compare its scores on that task with those of models that were not trained on the test sentences."
    )
    return ModelCard(
        model=best.model,
        metadata=hub_metadata(
            start,
            "text-ranking" if is_cross else "sentence-similarity",
            ["cross-encoder"] if is_cross else ["sentence-similarity", "feature-extraction"],
            pairs,
        ),
        title=f"{recipe.name}: {best.group}, {kind}",
        evaluated_as=best.name,
        sections=[
            _cycles_of(recipe, best, dropped, pairs, kind, start),
            *(
                f"Group {name} was dropped during training ({why}); later labels do not include it."
                for name, why in dropped.items()
            ),
            "" if task is None else transductive,
            _usage(_USE_CROSS if is_cross else _USE),
        ],
        closing=[
            "## Recipe\n\nThe resolved recipe is in `distcse/recipe.yaml`.",
            limits("Licenses of pairs and backbones apply to it."),
        ],
    )


def _cycles_of(recipe: MutualRecipe, best: Best, dropped: Mapping[str, str], pairs: int, kind: str, start: str) -> str:
    names = [group.name for group in recipe.groups if group.name != best.group and group.name not in dropped]
    others = f", together with {', '.join(names)}, with the groups' combined scores as labels" if names else ""
    dev = "" if best.dev is None else f" Its dev score there was {best.dev:.2f}."
    return (
        f"A {kind}, initialized from `{shown_name(start)}` and trained on {pairs:,} unlabeled sentence pairs with "
        f"Trans-Encoder's distillation{others}. This is the best checkpoint of cycle {best.phase.cycle}.{dev}"
    )
