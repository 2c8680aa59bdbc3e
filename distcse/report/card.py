"""Writes the model cards of a run: what the experiment states about each model, and the scores."""

from __future__ import annotations

import shutil

import yaml

from distcse.evaluation import Evaluation
from distcse.experiments.experiment import Result
from distcse.experiments.model_card import ModelCard
from distcse.recipe import recipe_yaml
from distcse.report.grids import grids, legend, markdown_table
from distcse.storage import open_store, write_text_atomic


def write_cards(result: Result) -> None:
    """Write README.md (the card), distcse/recipe.yaml and the card's files into the folder of every model."""
    for card in result.cards:
        details = card.model / "distcse"
        details.mkdir(exist_ok=True)
        for file in card.files:
            shutil.copyfile(file, details / file.name)
        write_text_atomic(details / "recipe.yaml", recipe_yaml(result.recipe))
        write_text_atomic(card.model / "README.md", card_markdown(card, result.evaluation))
        open_store(card.model).publish()


def card_markdown(card: ModelCard, evaluation: Evaluation | None) -> str:
    """Return a card as Markdown, with the hub's metadata in its front matter."""
    parts = [
        f"---\n{yaml.safe_dump(dict(card.metadata), sort_keys=False)}---",
        f"# {card.title}",
        *card.sections,
        scores_markdown(evaluation),
        *card.closing,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


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
