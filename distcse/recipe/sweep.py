"""A sweep: which knobs of a recipe are searched, between which bounds, how, and what the winner has to show."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from distcse.recipe.section import Name, Section

Value = bool | int | float | str | None | list[int]
Tracker = Literal["tensorboard", "mlflow", "wandb"]
Bounds = Annotated[list[float], Field(min_length=2, max_length=2)]


class ParameterSection(Section):
    """One knob: exactly one of its keys says what it may be."""

    values: Annotated[list[Value], Field(min_length=1)] | None = None
    """One of these; a grid takes each of them."""
    uniform: Bounds | None = None
    """A number between two bounds."""
    log_uniform: Bounds | None = None
    """A number between two bounds above 0, each power of ten as likely as another."""
    integers: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    """A whole number between two bounds, both included."""
    expression: str | None = None
    """Arithmetic on other knobs, each by the last part of its path or by the whole of it: `tau2 / 2`."""
    simplex: bool = False
    """Weights that add to 1, every division of it as likely as another. The path has a `*`: teachers.encoders.*.alpha."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = self._given()
        if len(given) != 1:
            kinds = "values, uniform, log_uniform, integers, expression, simplex"
            raise ValueError(f"gives {' and '.join(given) or 'nothing'}; a parameter has one of {kinds}")
        bounds = self.uniform or self.log_uniform or self.integers
        if bounds and bounds[0] >= bounds[1]:
            raise ValueError(f"{given[0]} is {bounds}; the first bound must lie below the second")
        if self.log_uniform and self.log_uniform[0] <= 0:
            raise ValueError(f"log_uniform is {self.log_uniform}; its bounds lie above 0")
        return self

    @property
    def kind(self) -> str:
        """The key that is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [key for key in type(self).model_fields if getattr(self, key) not in (None, False)]


class SearchSection(Section):
    """How the next trial is chosen."""

    algorithm: Literal["grid", "random", "tpe"] = "tpe"
    """Every combination of `values`; independent draws; or Optuna's multivariate TPE, which learns from the trials so far."""
    trials: Annotated[int, Field(ge=1)] = 24
    """Trials in all; a grid has as many as it has."""
    n_startup_trials: Annotated[int, Field(ge=1)] = 8
    """Trials that TPE draws at random before it learns."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the draws."""
    concurrent: Annotated[int, Field(ge=1)] | None = None
    """Trials at a time; null is as many as the cluster has room for."""
    max_failures: Annotated[int, Field(ge=0)] = 2
    """Times a trial that lost its process goes on from its last checkpoint."""
    hours: Annotated[float, Field(gt=0)] | None = None
    """The search ends after so many hours, with the trials under way; null sets no limit."""


class ScheduleSection(Section):
    """Which trials are ended early."""

    kind: Literal["none", "asha", "pbt"] = "asha"
    """ASHA ends a trial whose best dev score is not among the best of those that came as far. PBT goes on from a better trial's
    checkpoint with other values; its knobs are those that may change in the middle of a training."""
    grace_period: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of its training that every trial is given (ASHA), or between two exchanges (PBT)."""
    reduction_factor: Annotated[float, Field(gt=1)] = 3
    """Of so many trials that come to a rung, one goes on (ASHA)."""


class FinalRunsSection(Section):
    """What is trained again and measured when the search is over."""

    seeds: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] = Field(default_factory=lambda: [1, 2, 3])
    """The winner is trained with each of these seeds; none ends the sweep with the search."""
    compare: bool = True
    """Train the recipe as it is with the same seeds, to be compared with."""

    @model_validator(mode="after")
    def _seeds_differ(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds is {self.seeds}; a seed twice is no second measurement")
        return self


class Sweep(Section):
    """A search over a recipe's parameters."""

    name: Name = "sweep"
    """Name of the sweep's folder."""
    parameters: Annotated[dict[str, ParameterSection], Field(min_length=1)]
    """By recipe path, such as `objective.rank.tau2`: what the knob may be."""
    search: SearchSection = SearchSection()
    """How the next trial is chosen."""
    schedule: ScheduleSection = ScheduleSection()
    """Which trials are ended early."""
    final_runs: FinalRunsSection = FinalRunsSection()
    """What is trained again and measured at the end."""
    loggers: list[Tracker] = Field(default_factory=lambda: list[Tracker](["tensorboard"]))
    """Where trials are logged beside the sweep's own tables. MLflow and W&B are configured by their environment variables."""

    @model_validator(mode="after")
    def _can_be_searched(self) -> Self:
        if self.search.algorithm == "grid":
            for path, parameter in self.parameters.items():
                if parameter.kind not in ("values", "expression"):
                    raise ValueError(
                        f"a grid has values; parameters.{path} gives {parameter.kind}; write values, or random or tpe"
                    )
        if self.schedule.kind == "pbt" and self.search.algorithm == "tpe":
            raise ValueError("pbt changes values by itself; write search.algorithm: random")
        for path, parameter in self.parameters.items():
            if parameter.simplex != (".*." in path):
                raise ValueError(f"parameters.{path}: simplex goes with a `*` in the path, and only with it")
        return self
