"""The winner and the recipe as it was, over their seeds: mean and standard deviation on the dev set and on every test set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distcse.evaluation import Evaluation
from distcse.evaluation.runs import Spread, spread_of, spreads
from distcse.tuning.records import Trial

RECIPE, BEST = "recipe", "best"


@dataclass(frozen=True)
class Row:
    """One set, or an average."""

    suite: str
    set: str
    measure: str
    spreads: dict[str, Spread]
    """By model: `recipe` and `best`, in a mutual distillation each of their encoders."""
    seen: float = 0.0
    """The largest share of the set's sentences that was in a model's training text."""


def side_of(run: Trial) -> str:
    """Whether a run at the end has the winner's values, or those of the recipe as it was."""
    return RECIPE if run.values.keys() == {"seed"} else BEST


def dev_row(runs: Sequence[Trial]) -> Row | None:
    """Best dev scores of the runs at the end, each once; None where there are none."""
    scores: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: side_of(run) == BEST):
        if run.best is not None and run.status == "finished" and not run.recalled_from:
            scores.setdefault(side_of(run), []).append(run.best.score)
    found = {side: spread_of(values) for side, values in scores.items()}
    return Row("dev", "best of each run", "dev", found) if found else None


def set_rows(evaluation: Evaluation) -> list[Row]:
    """A row for every score, its models joined over their seeds; of STS the aggregate that was asked for."""
    asked = evaluation.settings.get("STS", "all")
    return [
        Row(
            score.suite,
            score.set,
            score.measure,
            spreads(score),
            max(evaluation.overlap_fraction(score, model) for model in score.values),
        )
        for score in evaluation.scores
        if score.suite != "sts" or score.measure == asked
    ]
