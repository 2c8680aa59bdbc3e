"""The model card: what the student is, who taught it, on what, and what was measured."""

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
    """Put README.md (the card) and distcse/recipe.yaml beside the saved model; the projection of its targets too."""
    model, projection = result.directory.model, result.directory.projection
    (model / "distcse").mkdir(exist_ok=True)
    if projection.exists():
        shutil.copyfile(projection, model / "distcse" / projection.name)
    write_text_atomic(model / "distcse" / "recipe.yaml", recipe_yaml(result.recipe))
    write_text_atomic(model / "README.md", card(result))
    upload_dir(model)


def card(result: Result) -> str:
    """Markdown with the hub's metadata in its front matter."""
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
        _space(result),
        scores_told(result.evaluation),
        "## Recipe\n\nThe resolved recipe is in `distcse/recipe.yaml`; `python -m distcse.train distcse/recipe.yaml` "
        "repeats the run.",
        "## Limits\n\nThe student knows what its teachers know and its corpus shows. Licences of corpus, backbone and "
        f"teachers apply to it. Made by distcse {__version__}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def base_model(start: str) -> dict[str, str]:
    """The hub's metadata of what a model began as; nothing where that is no model of the hub."""
    elsewhere = os.path.isabs(start) or is_uri(start) or start.startswith(PACKAGE)
    return {} if elsewhere else {"base_model": start}


def _summary(result: Result) -> str:
    student, position = result.recipe.student, result.outcome.state
    layers = f", layers {student.layers}" if student.layers else ""
    best = position.best
    dev = f" The best dev score was {best[1]:.2f}, at step {best[0]}; this is that checkpoint." if best else ""
    return (
        f"A sentence encoder that began as `{student.backbone}`{layers}, pooling `{student.pooling}`, and learned from "
        f"{result.rows:,} unlabelled sentences in {position.step} of {result.outcome.steps} steps.{dev}"
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


def _space(result: Result) -> str:
    """Whose documents the student's queries find, where it learned vectors."""
    regression, teachers = result.recipe.objective.regression, result.recipe.teachers.encoders
    if regression is None or not regression.weight:
        return ""
    chosen = [teachers[number].backbone for number in regression.teachers or range(len(teachers))]
    named = " and ".join(f"`{backbone}`" for backbone in chosen)
    if result.directory.projection.exists():
        told = (
            f"Its vectors are those of {named}, each times the root of its share, joined, and multiplied by the matrix in "
            "`distcse/projection.safetensors`: documents that were embedded so are found by this model's queries."
        )
    else:
        told = f"Its vectors lie in the space of {named}: documents embedded by that model are found by this model's queries."
    return f"## Shared space\n\n{told}"


def scores_told(evaluation: Evaluation | None) -> str:
    """The tables of an evaluation, for a card; nothing where nothing was measured."""
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
