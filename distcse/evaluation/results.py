"""Results of an evaluation as plain data: scores, their differences, means over runs, and the best model under limits."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from distcse.errors import EvaluationOptionError, EvaluationResultError
from distcse.evaluation.bootstrap import Interval
from distcse.evaluation.suites import PUBLISHED
from distcse.evaluation.tasks.agreement import KEPT, HeldOutVectors, TextsTask
from distcse.evaluation.tasks.retrieval import NDCG
from distcse.storage import ArtifactStore, open_store

T = TypeVar("T")

_RUN_SUFFIX = re.compile(r", (?:seed|run) \d+")


_TEACHER = "teacher"
_UNRANKED = "geometry"
"""The suite whose scores do not say which model is better."""
_MAIN_MEASURES = {"retrieval": NDCG, TextsTask.suite: KEPT}
"""Measures that say most about a suite; of other suites it is the first one."""
_RANKS = {"retrieval": 0, "sts": 1, HeldOutVectors.suite: 3, TextsTask.suite: 4}
"""Order of the suites by how much they say about a model; all others have rank 2."""


@dataclass(frozen=True)
class ModelInfo:
    """Description of an evaluated model."""

    name: str
    source: str
    kind: str
    """`bi-encoder`, `cross-encoder` or similar."""
    pooling: str
    max_length: int
    parameters: int
    seconds: float = 0.0
    """Time in the model's forward passes, over all suites."""
    contamination: Mapping[str, float] = field(default_factory=dict)
    """Share of each `suite/set`'s sentences in the model's training text, where it is known."""
    dimensions: int = 0
    """Dimension of its vectors; 0 if it has none or it is unknown."""
    size_bytes: int = 0
    """Size of its weights in memory."""
    sentences_per_s: float | None = None
    """Throughput on the device that measured it, of a cross-encoder in pairs; None if it was not measured."""
    latency_ms: float | None = None
    """Time for one sentence there, in milliseconds; None if it was not measured."""


@dataclass(frozen=True)
class Comparison:
    """One score of two models, with 95 % intervals of the paired bootstrap."""

    model: str
    against: str
    difference: Interval
    ratio: Interval | None = None
    """The model's score in percent of the other's; None where the other's is not above 0 in every resample."""


@dataclass(frozen=True)
class Score:
    """One measure on one set: a column of a table."""

    suite: str
    set: str
    measure: str
    values: Mapping[str, float]
    """Values by model, without the models that the measure does not apply to."""
    comparisons: Sequence[Comparison] = ()
    average: bool = False
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """By model, the interval of a score that is an agreement with another model, which has none itself."""

    def compared(self, model: str, other: str) -> Comparison | None:
        """Return the comparison with another model; None if the score cannot be resampled."""
        return next((c for c in self.comparisons if (c.model, c.against) == (model, other)), None)

    def against(self, model: str, other: str) -> Interval | None:
        """Return the difference from another model; None if the score cannot be resampled."""
        found = self.compared(model, other)
        return None if found is None else found.difference


@dataclass(frozen=True)
class Evaluation:
    """All results, as stored in evaluation.json."""

    models: Sequence[ModelInfo]
    base: str
    """Name of the model that all tables compare the others with."""
    scores: Sequence[Score]
    details: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """By suite, set and model: data for plots."""
    missing: Sequence[str]
    warnings: Sequence[str]
    settings: Mapping[str, str]
    seconds: float

    def score(self, suite: str, dataset: str, measure: str, model: str) -> float:
        """Return one score.

        Args:
            suite: Name of the suite, such as `sts`.
            dataset: Name of the set, such as `STS-B`.
            measure: Name of the measure, such as `all`.
            model: Name of the model.

        Raises:
            EvaluationResultError: It was not measured.
        """
        found = next((s for s in self.scores if (s.suite, s.set, s.measure) == (suite, dataset, measure)), None)
        if found is None or model not in found.values:
            measured = ", ".join(sorted({f"{s.suite}/{s.set}/{s.measure}" for s in self.scores}))
            raise EvaluationResultError(
                f"{suite}/{dataset}/{measure} of {model} was not measured; choose from: {measured}"
            )
        return found.values[model]

    def overlap_fraction(self, score: Score, model: str) -> float:
        """Return the share of a set's sentences in a model's training text; for an average, the maximum over its sets."""
        contamination = next(info.contamination for info in self.models if info.name == model)
        measured = {s.set for s in self.scores if s.suite == score.suite and not s.average}
        sets = averaged_sets(score.suite, measured) if score.average else [score.set]
        return max((contamination.get(f"{score.suite}/{name}", 0.0) for name in sets), default=0.0)

    def overlaps(self, score: Score) -> dict[str, float]:
        """Return `overlap_fraction` of each model whose training text contained sentences of a score's set."""
        return {model: share for model in score.values if (share := self.overlap_fraction(score, model))}

    def write(self, folder: Path | ArtifactStore) -> None:
        """Write the results as evaluation.json, each score with its `overlap`."""
        scores = [{**asdict(score), "overlap": self.overlaps(score)} for score in self.scores]
        content = json.dumps({**asdict(self), "scores": scores}, indent=1, ensure_ascii=False)
        open_store(folder).write_text("evaluation.json", content)

    @classmethod
    def read(cls, file: Path) -> Evaluation:
        """Read a file that `write` wrote."""
        try:
            return TypeAdapter(cls).validate_python(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise EvaluationResultError(f"{file} contains no readable evaluation: {error}") from None


def headlines(scores: Iterable[Score]) -> list[Score]:
    """Return the score of each suite that says which model is better: its main measure's average, or else that of its first set.

    Retrieval comes first, STS second, and agreement, which needs no labels, last.
    """
    by_suite: dict[str, list[Score]] = {}
    for score in scores:
        if score.suite != _UNRANKED:
            by_suite.setdefault(score.suite, []).append(score)
    found = []
    for suite, of_suite in by_suite.items():
        main = next((score for score in of_suite if score.measure == _MAIN_MEASURES.get(suite)), of_suite[0])
        found.append(next((s for s in of_suite if s.average and s.measure == main.measure), main))
    return sorted(found, key=lambda score: _RANKS.get(score.suite, 2))


def choose_reference(names: Sequence[str], scores: Iterable[Score] = (), teachers: Collection[str] = ()) -> str:
    """Return the name of the model to compare the others with.

    It is `teacher`; else the best of a run's `teachers` by the first of the `headlines` that one of them has; else the last
    model whose name begins with "teacher"; else the first.
    """
    if _TEACHER in names:
        return _TEACHER
    for score in headlines(scores):
        if known := [name for name in teachers if name in score.values]:
            return max(known, key=score.values.__getitem__)
    return next((name for name in reversed(names) if name.startswith(_TEACHER)), names[0])


def averaged_sets(suite: str, measured: Collection[str]) -> list[str]:
    """Return the measured sets that are part of a suite's average: of retrieval, every set."""
    if suite == "retrieval":
        return [*measured]
    return [known.name for known in PUBLISHED.get(suite, ()) if known.name in measured]


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


def number_runs(sources: Mapping[str, Sequence[T]]) -> dict[str, T]:
    """Map names to sources; several sources of one name become its runs, numbered from 1."""
    return {
        f"{name}, run {number}" if len(runs) > 1 else name: source
        for name, runs in sources.items()
        for number, source in enumerate(runs, start=1)
    }


@dataclass(frozen=True)
class Limits:
    """What a model may need."""

    ms: float | None = None
    """Milliseconds for one sentence, or pair, on the device that measures. None: any."""
    mb: float | None = None
    """Megabytes (10⁶ bytes) of weights in memory. None: any."""

    def __bool__(self) -> bool:
        return self.ms is not None or self.mb is not None

    def __str__(self) -> str:
        parts = [f"{value:g} {unit}" for value, unit in ((self.ms, "ms"), (self.mb, "MB")) if value is not None]
        return " and ".join(parts)

    def check(self) -> None:
        """Raise `EvaluationOptionError` for a limit that no model can keep, or none can exceed."""
        for option, value in (("--max-ms", self.ms), ("--max-mb", self.mb)):
            if value is not None and not 0 < value < math.inf:
                raise EvaluationOptionError(f"{option} is {value:g}; write a number above 0")

    def check_suites(self, suites: Collection[str]) -> None:
        """Raise `EvaluationOptionError` if no suite that is measured says which model is best."""
        if self and {*suites} <= {_UNRANKED}:
            raise EvaluationOptionError(
                "alignment and uniformity do not say which model is best; add a suite, such as --suite sts,geometry"
            )

    def allow(self, model: ModelInfo) -> bool:
        """Return whether a model keeps the limits; one whose time or size was not measured, such as an ensemble, does not."""
        is_fast = self.ms is None or (model.latency_ms is not None and model.latency_ms <= self.ms)
        return is_fast and (self.mb is None or (model.size_bytes > 0 and model.size_bytes / 1e6 <= self.mb))


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Choice:
    """The best model under limits."""

    limits: Limits
    score: Score
    """The score that ranks the models: the first suite's average, or its first set's score."""
    model: ModelInfo | None
    """None if no model keeps the limits."""
    scored: Sequence[ModelInfo]
    """The models that have this score."""

    @classmethod
    def of(cls, evaluation: Evaluation, limits: Limits) -> Choice | None:
        """Choose among the models of an evaluation; None without limits, or if nothing was measured that ranks models."""
        ranked = [score for score in evaluation.scores if score.suite != _UNRANKED]
        if not (limits and ranked):
            return None
        suite = [score for score in ranked if score.suite == ranked[0].suite]
        score = next((score for score in suite if score.average), suite[0])
        if score.suite == TextsTask.suite:  # tables leave out the agreement of the reference with itself
            score = replace(score, values={evaluation.base: 100.0, **score.values})
        scored = [model for model in evaluation.models if not math.isnan(score.values.get(model.name, math.nan))]
        allowed = [model for model in scored if limits.allow(model)]
        best = max(allowed, key=lambda model: score.values[model.name], default=None)
        return cls(limits, score, best, scored)

    def __str__(self) -> str:
        """Return the choice as a line of text, or what the fastest and the smallest model need if none keeps the limits."""
        name = f"{self.score.suite} {self.score.set}"
        if self.model is not None:
            needs = [] if self.model.latency_ms is None else [f"{self.model.latency_ms:.1f} ms"]
            needs.append(f"{self.model.size_bytes / 1e6:.1f} MB")
            value = self.score.values[self.model.name]
            return f"best within {self.limits}: {self.model.name}, {name} {value:.2f}, {', '.join(needs)}"
        times = [model.latency_ms for model in self.scored if model.latency_ms is not None]
        sizes = [model.size_bytes for model in self.scored if model.size_bytes]
        least = [f"the fastest takes {min(times):.1f} ms"] if times else []
        least += [f"the smallest has {min(sizes) / 1e6:.1f} MB"] if sizes else []
        return f"no model with a score in {name} is within {self.limits}: {', '.join(least) or 'none was measured'}"
