"""Which of several measured models is best under limits of time and size."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from distcse.errors import EvaluationOptionError
from distcse.evaluation.evaluation import Evaluation, ModelInfo, Score
from distcse.evaluation.tasks.agreement import TextsTask

_UNRANKED = "geometry"
"""The suite whose scores do not say which model is better."""


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
        """Choose among the models of an evaluation; None without limits, or if nothing was measured that ranks models.

        Args:
            evaluation: The results, with the models' speed where `limits` has a time.
            limits: What the model may need.
        """
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
