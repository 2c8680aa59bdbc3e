"""Several runs of one thing, which differ by their seed: their figures joined, as mean and standard deviation."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distcse.evaluation.evaluation import Evaluation, Score

_WHICH = re.compile(r", (?:seed|run) \d+")


@dataclass(frozen=True)
class Spread:
    """One figure over several runs."""

    mean: float
    deviation: float
    """Sample standard deviation; 0 of one run."""
    number: int


def spread_of(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


def joined(names: Iterable[str]) -> dict[str, list[str]]:
    """Models by what they are runs of: `list_net` of `list_net, run 1` and `list_net, run 2`."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_WHICH.sub("", name), []).append(name)
    return found


def spreads(score: Score) -> dict[str, Spread]:
    """A score by what its models are runs of."""
    return {name: spread_of([score.values[run] for run in runs]) for name, runs in joined(score.values).items()}


def has_several(evaluation: Evaluation) -> bool:
    """Whether something was measured in several runs."""
    return any(len(runs) > 1 for runs in joined(about.name for about in evaluation.models).values())


def numbered(sources: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Models by name, of sources by name: several of one name are its runs."""
    return {
        f"{name}, run {number}" if len(several) > 1 else name: source
        for name, several in sources.items()
        for number, source in enumerate(several, start=1)
    }
