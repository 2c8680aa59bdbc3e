"""Which of several measured models is best under limits of time and size."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from distcse.errors import EvaluationOptionError
from distcse.evaluation.evaluation import Evaluation, ModelInfo, Score

_LESS_IS_BETTER = "geometry"
"""The suite whose scores do not rank models."""


@dataclass(frozen=True)
class Limits:
    """What a model may need."""

    ms: float | None = None
    """Milliseconds for one sentence, on the device that measures. None: any."""
    mb: float | None = None
    """Megabytes (10⁶ bytes) of weights in memory. None: any."""

    def __bool__(self) -> bool:
        return self.ms is not None or self.mb is not None

    def __str__(self) -> str:
        parts = [f"{value:g} {unit}" for value, unit in ((self.ms, "ms"), (self.mb, "MB")) if value is not None]
        return " and ".join(parts)

    def check(self, suites: Collection[str]) -> None:
        """Check the limits before anything is measured.

        Args:
            suites: The suites to measure.

        Raises:
            EvaluationOptionError: No model can keep a limit, or no suite says which model is best.
        """
        for option, value in (("--max-ms", self.ms), ("--max-mb", self.mb)):
            if value is not None and not value > 0:
                raise EvaluationOptionError(f"{option} is {value:g}; write a number above 0")
        if self and {*suites} <= {_LESS_IS_BETTER}:
            raise EvaluationOptionError(
                "alignment and uniformity do not say which model is best; add a suite, such as --suite sts,geometry"
            )

    def allow(self, model: ModelInfo) -> bool:
        """Return whether a model keeps the limits; one whose time or size was not measured, such as an ensemble, does not."""
        is_fast = self.ms is None or (model.latency_ms is not None and model.latency_ms <= self.ms)
        return is_fast and (self.mb is None or 0 < model.size_bytes <= 1e6 * self.mb)


@dataclass(frozen=True)
class Choice:
    """The best model under limits."""

    limits: Limits
    score: Score
    """The score that ranks the models: the first suite's average, or its first set's score."""
    model: ModelInfo | None
    """None if no model keeps the limits."""

    @classmethod
    def of(cls, evaluation: Evaluation, limits: Limits) -> Choice | None:
        """Choose among the models of an evaluation; None without limits, or if nothing was measured that ranks models.

        Args:
            evaluation: The results, with the models' speed where `limits` has a time.
            limits: What the model may need.
        """
        ranked = [score for score in evaluation.scores if score.suite != _LESS_IS_BETTER]
        if not (limits and ranked):
            return None
        suite = [score for score in ranked if score.suite == ranked[0].suite]
        score = next((score for score in suite if score.average), suite[0])
        allowed = [model for model in evaluation.models if model.name in score.values and limits.allow(model)]
        return cls(limits, score, max(allowed, key=lambda model: score.values[model.name], default=None))

    def describe(self, evaluation: Evaluation) -> str:
        """Return the choice as a line of text, or what the fastest and the smallest model need if none keeps the limits."""
        if self.model is not None:
            value = self.score.values[self.model.name]
            return (
                f"best within {self.limits}: {self.model.name}, {self.score.suite} {self.score.set} {value:.2f}, "
                f"{', '.join(_needs(self.model))}"
            )
        times = [model.latency_ms for model in evaluation.models if model.latency_ms is not None]
        sizes = [model.size_bytes for model in evaluation.models if model.size_bytes]
        least = [f"the fastest takes {min(times):.1f} ms"] if times else []
        least += [f"the smallest has {min(sizes) / 1e6:.1f} MB"] if sizes else []
        return f"no model is within {self.limits}: {', '.join(least)}"


def _needs(model: ModelInfo) -> list[str]:
    time = [] if model.latency_ms is None else [f"{model.latency_ms:.1f} ms for one sentence"]
    return [*time, f"{model.size_bytes / 1e6:.1f} MB"]
