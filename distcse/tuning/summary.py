"""The winner and the recipe as it was, over their seeds: mean and standard deviation on every test set."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distcse.evaluation import Evaluation

_SEED = re.compile(r", seed \d+")


@dataclass(frozen=True)
class Spread:
    """One figure over several seeds."""

    mean: float
    deviation: float
    """Sample standard deviation; 0 with one seed."""
    number: int


@dataclass(frozen=True)
class Row:
    """One test set, or an average."""

    suite: str
    set: str
    measure: str
    spreads: dict[str, Spread]
    """By model, such as `recipe` and `best`."""


def summary_of(evaluation: Evaluation) -> list[Row]:
    """A row for every score, its models joined over their seeds."""
    return [
        Row(
            score.suite,
            score.set,
            score.measure,
            {name: spread_of(values) for name, values in _joined(score.values).items()},
        )
        for score in evaluation.scores
    ]


def spread_of(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


def _joined(values: Mapping[str, float]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, value in values.items():
        found.setdefault(_SEED.sub("", name), []).append(value)
    return found
