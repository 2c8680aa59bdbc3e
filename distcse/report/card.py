"""Writes the model cards of a run: what the experiment states about each model, and the scores."""

from __future__ import annotations

import shutil
from typing import Any

import yaml

from distcse.evaluation import Evaluation, Score
from distcse.evaluation.contamination import NOTICED_FROM
from distcse.recipe import recipe_yaml
from distcse.report.grids import MEASURES, TITLES, grids, legend, markdown_table
from distcse.report.verdict import explain, verdict
from distcse.runs.result import ModelCard, Result
from distcse.storage import open_store

_NO_MEASUREMENTS = ("dev", "texts")
"""Suites that the hub's metadata leave out: the dev set that chose the model, and agreement with another model on texts."""


def write_cards(result: Result) -> None:
    """Write README.md (the card), distcse/recipe.yaml and the card's files into the folder of every model."""
    for card in result.cards:
        model = open_store(card.model, result.directory.store.guard)
        model.write_part("distcse/recipe.yaml", recipe_yaml(result.recipe))
        for file in card.files:
            shutil.copyfile(file, card.model / "distcse" / file.name)
        model.write_part("README.md", card_markdown(card, result.evaluation))
        model.publish()


def card_markdown(card: ModelCard, evaluation: Evaluation | None) -> str:
    """Return a card as Markdown, with the hub's metadata in its front matter."""
    metadata = {**card.metadata, **model_index(card, evaluation)}
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# {card.title}",
        _verdict_of(card, evaluation),
        *card.sections,
        scores_markdown(evaluation),
        *card.closing,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict_of(card: ModelCard, evaluation: Evaluation | None) -> str:
    line = "" if evaluation is None else verdict(evaluation).get(card.evaluated_as, "")
    return f"**{line}**\n\n{explain(evaluation)}" if evaluation and line else ""


def model_index(card: ModelCard, evaluation: Evaluation | None) -> dict[str, Any]:
    """Return the model's scores as the hub's `model-index` metadata; empty without scores.

    Averages are left out, and scores on sets that were in the training text, because the hub shows no mark.
    """
    if evaluation is None:
        return {}
    results = [
        {
            "task": {"type": card.metadata["pipeline_tag"]},
            "dataset": {"type": f"{score.suite}/{score.set}".lower().replace(" ", "-"), "name": score.set},
            "metrics": [{"type": score.measure, "name": measure_name(score), "value": round(value, 4)}],
        }
        for score in evaluation.scores
        if not score.average
        and score.suite not in _NO_MEASUREMENTS
        and (value := score.values.get(card.evaluated_as)) is not None
        and evaluation.overlap_fraction(score, card.evaluated_as) < NOTICED_FROM
    ]
    return {"model-index": [{"name": card.title, "results": results}]} if results else {}


def measure_name(score: Score) -> str:
    """Return what a score measures, for readers."""
    known = (
        {} if score.suite == "retrieval" else MEASURES
    )  # its nDCG@10 has labels, not the teachers' cosines, as gains
    return known.get(score.measure, f"{TITLES.get(score.suite, score.suite)}, {score.measure}")


def scores_markdown(evaluation: Evaluation | None) -> str:
    """Return an evaluation's tables as Markdown, for a card; empty without scores."""
    if evaluation is None or not evaluation.scores:
        return ""
    lines = ["## Scores", "", "Measured by distcse at the end of the run."]
    for grid in grids(evaluation):
        lines += ["", f"**{grid.title}**{f' ({grid.measure})' if grid.measure else ''}", "", *markdown_table(grid)]
    if marks := legend(evaluation):
        lines += ["", *(f"- {line}" for line in marks)]
    if evaluation.warnings:
        lines += ["", *(f"- Warning: {line}" for line in evaluation.warnings)]
    if evaluation.missing:
        lines += ["", f"Not measured: {'; '.join(evaluation.missing)}."]
    return "\n".join(lines)
