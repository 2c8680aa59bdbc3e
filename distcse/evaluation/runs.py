"""Several runs of one model that differ by their seed: group them, and summarize scores as mean and standard deviation."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distcse.evaluation.evaluation import Evaluation, Score

_RUN_SUFFIX = re.compile(r", (?:seed|run) \d+")


@dataclass(frozen=True)
class Spread:
    """One score over several runs."""

    mean: float
    deviation: float
    """Sample standard deviation; 0 for one run."""
    number: int


def compute_spread(values: Sequence[float]) -> Spread:
    """Compute mean and sample standard deviation."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


def group_runs(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names of models by model: `list_net` for `list_net, run 1` and `list_net, run 2`."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_RUN_SUFFIX.sub("", name), []).append(name)
    return found


def compute_spreads(score: Score) -> dict[str, Spread]:
    """Compute the spread of a score over the runs of each model."""
    return {
        name: compute_spread([score.values[run] for run in runs]) for name, runs in group_runs(score.values).items()
    }


def has_repeated_runs(evaluation: Evaluation) -> bool:
    """Whether a model was evaluated in several runs."""
    return any(len(runs) > 1 for runs in group_runs(about.name for about in evaluation.models).values())


def number_runs(sources: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Map names to sources; several sources of one name become its runs, numbered from 1."""
    return {
        f"{name}, run {number}" if len(runs) > 1 else name: source
        for name, runs in sources.items()
        for number, source in enumerate(runs, start=1)
    }
