"""Runs of one recipe with several seeds: their recipes, and their evaluations as one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from distcse.evaluation import Evaluation, Score
from distcse.recipe import BaseRecipe, with_values
from distcse.storage import open_store

R = TypeVar("R", bound=BaseRecipe)


def seed_recipes(recipe: R, seeds: Sequence[int]) -> tuple[Path, dict[int, R]]:
    """Return the folder of what the runs have in common, and a recipe for each seed, whose run has an id there.

    The folder is `<runs>/<run_id>`; without `storage.run_id`, a new `<runs>/<name>-<time>-<digits>`.
    """
    name = recipe.storage.run_id or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    values = {seed: {"seed": seed, "seeds": [], "storage.run_id": f"{name}-seed-{seed}"} for seed in seeds}
    return open_store(recipe.storage.runs).path / name, {
        seed: with_values(recipe, each) for seed, each in values.items()
    }


def merged(evaluations: Mapping[int, Evaluation]) -> Evaluation:
    """Return the evaluations of runs by seed as one.

    A model that is another one in each run, or has other scores, is there once per run: `student, seed 0`, `student, seed 1`.
    """
    first, *_ = found = [*evaluations.values()]
    names = [about.name for about in first.models]
    varying = [name for name in names if len({_identity(evaluation, name) for evaluation in found}) > 1]
    runs = [
        _renamed(evaluation, {name: f"{name}, seed {seed}" for name in varying})
        for seed, evaluation in evaluations.items()
    ]
    by_place = zip_longest(*(run.models for run in runs))  # a stop leaves the last ones out
    models = {about.name: about for abouts in by_place for about in abouts if about is not None}
    scores: dict[tuple[str, str, str], Score] = {}
    details: dict[str, dict[str, dict[str, Any]]] = {}
    for run in runs:
        for score in run.scores:
            before = scores.setdefault((score.suite, score.set, score.measure), score)
            intervals = {**score.intervals, **before.intervals}
            comparisons = {(each.model, each.against): each for each in (*score.comparisons, *before.comparisons)}
            merged_values = {**score.values, **before.values}
            scores[score.suite, score.set, score.measure] = replace(
                before, values=merged_values, comparisons=[*comparisons.values()], intervals=intervals
            )
        for suite, sets in run.details.items():
            for name, of_models in sets.items():
                details.setdefault(suite, {}).setdefault(name, {}).update(of_models)
    return replace(
        runs[0],
        models=[*models.values()],
        scores=[*scores.values()],
        details=details,
        missing=[*dict.fromkeys(line for run in runs for line in run.missing)],
        warnings=[*dict.fromkeys(line for run in runs for line in run.warnings)],
        seconds=sum(run.seconds for run in runs),
    )


def _identity(evaluation: Evaluation, model: str) -> tuple[object, ...]:
    """Return what tells a model of one run from that of the same name of another: where it is, and its scores."""
    source = next((about.source for about in evaluation.models if about.name == model), None)
    return source, *(score.values.get(model) for score in evaluation.scores)


def _renamed(evaluation: Evaluation, names: Mapping[str, str]) -> Evaluation:
    """Return an evaluation with other names for some models."""

    def new(name: str) -> str:
        return names.get(name, name)

    return replace(
        evaluation,
        models=[replace(about, name=new(about.name)) for about in evaluation.models],
        base=new(evaluation.base),
        scores=[
            replace(
                score,
                values={new(name): value for name, value in score.values.items()},
                intervals={new(name): interval for name, interval in score.intervals.items()},
                comparisons=[
                    replace(each, model=new(each.model), against=new(each.against)) for each in score.comparisons
                ],
            )
            for score in evaluation.scores
        ],
        details={
            suite: {key: {new(name): found for name, found in models.items()} for key, models in sets.items()}
            for suite, sets in evaluation.details.items()
        },
    )
