"""The model card of a student: its backbone, teachers, corpus and scores."""

from __future__ import annotations

import os
import shutil

import yaml

from distcse import __version__
from distcse.evaluation import Evaluation
from distcse.experiments.distillation.run import Result
from distcse.files import write_text_atomic
from distcse.models.source import PACKAGE
from distcse.recipe import recipe_yaml
from distcse.report.grids import grids, legend, markdown_table
from distcse.storage import is_uri, upload_dir


def write_card(result: Result) -> None:
    """Write README.md (the card), distcse/recipe.yaml and the targets' projection into the saved model's folder."""
    model, projection = result.directory.model, result.directory.projection
    (model / "distcse").mkdir(exist_ok=True)
    if projection.exists():
        shutil.copyfile(projection, model / "distcse" / projection.name)
    write_text_atomic(model / "distcse" / "recipe.yaml", recipe_yaml(result.recipe))
    write_text_atomic(model / "README.md", card(result))
    upload_dir(model)


def card(result: Result) -> str:
    """Return the card as Markdown, with the hub's metadata in its front matter."""
    recipe = result.recipe
    start = recipe.student.backbone
    metadata = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": [
            "sentence-transformers",
            "sentence-similarity",
            "feature-extraction",
            "distillation",
            "distcse",
            f"dataset_size:{result.rows}",
        ],
        **base_model(start),
    }
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# {recipe.name}",
        _summary(result),
        "## Use\n\n```python\nfrom sentence_transformers import SentenceTransformer\n\n"
        'model = SentenceTransformer("path/to/this/folder")\nvectors = model.encode(["A sentence.", "Another one."])\n```',
        _teachers(result),
        _shared_space(result),
        scores_markdown(result.evaluation),
        "## Recipe\n\nThe resolved recipe is in `distcse/recipe.yaml`; `python -m distcse.train distcse/recipe.yaml` "
        "repeats the run.",
        "## Limits\n\nThe student is limited by its teachers and its corpus. The licences of corpus, backbone and "
        f"teachers apply to it. Made by distcse {__version__}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def base_model(backbone: str) -> dict[str, str]:
    """Return the hub's `base_model` metadata; empty if the initial model is not from the hub."""
    outside_hub = os.path.isabs(backbone) or is_uri(backbone) or backbone.startswith(PACKAGE)
    return {} if outside_hub else {"base_model": backbone}


def _summary(result: Result) -> str:
    student, position = result.recipe.student, result.train_result.state
    layers = f", layers {student.layers}" if student.layers else ""
    best = position.best
    dev = f" This is the checkpoint with the best dev score, {best[1]:.2f} at step {best[0]}." if best else ""
    return (
        f"A sentence encoder, initialized from `{student.backbone}`{layers}, pooling `{student.pooling}`, and trained on "
        f"{result.rows:,} unlabelled sentences for {position.step} of {result.train_result.steps} steps.{dev}"
    )


def _teachers(result: Result) -> str:
    teachers = result.recipe.teachers.encoders
    if not teachers:
        return ""
    total = sum(teacher.alpha for teacher in teachers)
    rows = [
        f"| `{teacher.backbone}` | {teacher.alpha / total:.3f} | {teacher.pooling or 'as saved'} "
        f"| {teacher.max_length or 'as saved'} |"
        for teacher in teachers
    ]
    return "\n".join(["## Teachers", "", "| teacher | weight | pooling | tokens |", "|---|---|---|---|", *rows])


def _shared_space(result: Result) -> str:
    """Return which teachers' document embeddings the student can search, if it was trained on their vectors."""
    regression, teachers = result.recipe.objective.regression, result.recipe.teachers.encoders
    if regression is None or not regression.weight:
        return ""
    chosen = [teachers[number].backbone for number in regression.teachers or range(len(teachers))]
    named = " and ".join(f"`{backbone}`" for backbone in chosen)
    if result.directory.projection.exists():
        text = (
            f"Its vectors approximate those of {named}, each scaled by the root of its weight, concatenated, and multiplied by "
            "the matrix in `distcse/projection.safetensors`. Use this model for queries on documents embedded this way."
        )
    else:
        text = (
            f"Its vectors lie in the space of {named}. Use this model for queries on documents embedded by that model."
        )
    return f"## Shared space\n\n{text}"


def scores_markdown(evaluation: Evaluation | None) -> str:
    """Return an evaluation's tables as Markdown, for a card; empty without scores."""
    if evaluation is None or not evaluation.scores:
        return ""
    lines = ["## Scores", "", "Measured by distcse at the end of the run."]
    for grid in grids(evaluation):
        lines += ["", f"**{grid.title}**{f' ({grid.measure})' if grid.measure else ''}", "", *markdown_table(grid)]
    if marks := legend(evaluation):
        lines += ["", *(f"- {line}" for line in marks)]
    if evaluation.missing:
        lines += ["", f"Not measured: {'; '.join(evaluation.missing)}."]
    return "\n".join(lines)
