"""The search space of a sweep: parameters, search algorithm, early stopping and final runs."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from distcse.recipe.section import Name, Section, Seed, Seeds

Value = bool | int | float | str | None | list[int]
Tracker = Literal["tensorboard", "mlflow", "wandb"]
Bounds = Annotated[list[float], Field(min_length=2, max_length=2)]

OVERRIDE_PREFIX = "sweep."
"""What an override of a search space begins with, on the command line of `distcse tune`."""


class ParameterSection(Section):
    """Values of one searched parameter: exactly one of the keys."""

    values: Annotated[list[Value], Field(min_length=1)] | None = None
    """One of a list; a grid tries each."""
    uniform: Bounds | None = None
    """A number between two bounds, uniformly."""
    log_uniform: Bounds | None = None
    """A number between two positive bounds, uniformly on a log scale."""
    integers: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    """An integer between two bounds, both included."""
    expression: str | None = None
    """Arithmetic on other parameters, by path or its last part: `tau2 / 2`."""
    simplex: bool = False
    """Weights that sum to 1, uniform on the simplex; the path contains a `*`: `teachers.encoders.*.alpha`."""

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
        """The key that is set."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [key for key in type(self).model_fields if getattr(self, key) not in (None, False)]


class SearchSection(Section):
    """How the next trial is chosen."""

    algorithm: Literal["grid", "random", "tpe"] = "tpe"
    """`grid` tries every combination of `values`; `random` draws independently; `tpe` is Optuna's multivariate TPE."""
    trials: Annotated[int, Field(ge=1)] = 24
    """Number of trials; a grid runs all combinations."""
    n_startup_trials: Annotated[int, Field(ge=1)] = 8
    """Random trials before TPE starts."""
    seed: Seed = 0
    """Seed of the search."""
    concurrent: Annotated[int, Field(ge=1)] | None = None
    """Concurrent trials; null runs as many as fit on the cluster."""
    max_failures: Annotated[int, Field(ge=0)] = 2
    """Restarts of a trial after losing its process."""
    hours: Annotated[float, Field(gt=0)] | None = None
    """Hours after which search and running trials stop; null sets no limit."""


class ScheduleSection(Section):
    """Which trials are stopped early."""

    kind: Literal["none", "asha", "pbt"] = "asha"
    """`asha` stops trials whose best dev score is not among the best at their rung. `pbt` continues a trial from a better one's
    checkpoint with other values, of parameters that may change during training."""
    grace_period: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of a training that each trial completes (ASHA), or between two exchanges (PBT)."""
    reduction_factor: Annotated[float, Field(gt=1)] = 3
    """ASHA continues one of this many trials at a rung."""


class FinalRunsSection(Section):
    """Runs and evaluation after the search."""

    seeds: Seeds = Field(default_factory=lambda: [1, 2, 3])
    """Seeds to train the best values with; an empty list ends the sweep after the search."""
    compare: bool = True
    """Also train the original recipe."""


class Sweep(Section):
    """A search over a recipe's parameters."""

    name: Name = "sweep"
    """Name of the sweep's folder."""
    parameters: Annotated[dict[str, ParameterSection], Field(min_length=1)]
    """Values to search, by recipe path, such as `objective.rank.tau2`."""
    search: SearchSection = SearchSection()
    """How the next trial is chosen."""
    schedule: ScheduleSection = ScheduleSection()
    """Which trials are stopped early."""
    final_runs: FinalRunsSection = FinalRunsSection()
    """Runs and evaluation after the search."""
    loggers: list[Tracker] = Field(default_factory=lambda: list[Tracker](["tensorboard"]))
    """Trackers of trials; MLflow and W&B are configured by their environment variables."""

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
