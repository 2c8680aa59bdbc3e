"""Scores of a sweep's final runs, best trial and original recipe: mean and standard deviation over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distcse.evaluation import Evaluation
from distcse.evaluation.runs import Spread, compute_spread, compute_spreads
from distcse.tuning.records import Trial

RECIPE, BEST = "recipe", "best"


@dataclass(frozen=True)
class SummaryRow:
    """Scores on one set, or an average over sets."""

    suite: str
    set: str
    measure: str
    spreads: dict[str, Spread]
    """By model: `recipe` and `best`; in a mutual distillation, each of their encoders."""
    seen: float = 0.0
    """Largest fraction of the set's sentences in a model's training text."""


def variant_of(run: Trial) -> str:
    """Return `best` for a final run with the best trial's values, `recipe` for one with the original recipe's values."""
    return RECIPE if run.values.keys() == {"seed"} else BEST


def dev_row(runs: Sequence[Trial]) -> SummaryRow | None:
    """Summarize the final runs' best dev scores; None if there are none. A run that reuses another's scores is left out."""
    scores: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: variant_of(run) == BEST):
        if run.best is not None and run.status == "finished" and not run.reused_from:
            scores.setdefault(variant_of(run), []).append(run.best.score)
    found = {side: compute_spread(values) for side, values in scores.items()}
    return SummaryRow("dev", "best of each run", "dev", found) if found else None


def set_rows(evaluation: Evaluation) -> list[SummaryRow]:
    """Summarize every score over the models' seeds; of STS only the aggregate in the evaluation's settings."""
    aggregate = evaluation.settings.get("STS", "all")
    return [
        SummaryRow(
            score.suite,
            score.set,
            score.measure,
            compute_spreads(score),
            max(evaluation.overlap_fraction(score, model) for model in score.values),
        )
        for score in evaluation.scores
        if score.suite != "sts" or score.measure == aggregate
    ]
