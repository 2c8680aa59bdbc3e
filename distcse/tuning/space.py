"""A search space over a recipe's parameters: what may be sampled, and the recipe values that a sample gives."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simpleeval import InvalidExpression, NameNotDefined, simple_eval

from distcse.errors import SearchSpaceError
from distcse.recipe import BaseRecipe, ParameterSection, Sweep, with_values
from distcse.recipe.section import is_inside
from distcse.runs.experiment import experiment_of

Sample = dict[str, Any]
"""Values that a searcher chose, by recipe path."""

WEIGHT_BOUNDS = (1e-6, 1 - 1e-6)
"""A weight of a simplex is −log u, with u drawn between these bounds."""
_SEARCHABLE_OF_TEACHER = ("alpha",)
_WITHOUT_EFFECT = ("workers", "cpus_per_worker", "gpus_per_worker", "max_failures", "log_every")
_FIXED_IN_TRAINING = (
    "objective.regression.teachers",
    "objective.regression.projection",
    "objective.detection.generator",
)
"""Keys that checkpoints or targets depend on."""
_CHANGEABLE_IN_TRAINING = (
    "objective",
    "training.lr",
    "training.weight_decay",
    "training.gradient_clipping",
    "teachers",
)


class Space:
    """The searched parameters of a recipe."""

    def __init__(self, sweep: Sweep, recipe: BaseRecipe) -> None:
        self._recipe = recipe
        self.parameters: dict[str, ParameterSection] = {}
        self._simplices: list[list[str]] = []
        for path, parameter in sweep.parameters.items():
            paths = self._members(path) if parameter.simplex else [path]
            if parameter.simplex:
                self._simplices.append(paths)
            for member in paths:
                if member in self.parameters:
                    raise SearchSpaceError(f"parameters.{member} is given twice")
                self._check_path(member, sweep)
                self.parameters[member] = parameter
        self._check_effects([self.recipe(sample) for sample in self._corners()])

    @property
    def free(self) -> dict[str, ParameterSection]:
        """The parameters that a searcher chooses, without those that have an expression."""
        return {path: parameter for path, parameter in self.parameters.items() if parameter.expression is None}

    @property
    def choices(self) -> dict[str, list[Any]]:
        """The values of each free parameter that has a list of values, in the form that searchers take."""
        return {
            path: [self.plain(value) for value in parameter.values]
            for path, parameter in self.free.items()
            if parameter.values is not None
        }

    def grid(self) -> list[Sample]:
        """Return every combination of the parameters' values."""
        choices = [[(path, value) for value in parameter.values or ()] for path, parameter in self.free.items()]
        return [dict(combination) for combination in itertools.product(*choices)]

    def distributions(self) -> dict[str, Any]:
        """Return Optuna's distribution of each free parameter."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        choices, found = self.choices, dict[str, Any]()
        for path, parameter in self.free.items():
            if parameter.values is not None:
                found[path] = CategoricalDistribution(choices[path])
            elif parameter.integers:
                found[path] = IntDistribution(parameter.integers[0], parameter.integers[1])
            elif parameter.simplex:
                found[path] = FloatDistribution(*WEIGHT_BOUNDS)
            else:
                low, high = parameter.uniform or parameter.log_uniform or []
                found[path] = FloatDistribution(low, high, log=parameter.log_uniform is not None)
        return found

    def draw(self, number: int, seed: int) -> list[Sample]:
        """Return independent random samples, equal for equal seeds."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
        return [dict(study.ask(self.distributions()).params) for _ in range(number)]

    def clip(self, sample: Sample) -> Sample:
        """Return a sample with its values limited to their bounds; PBT's perturbations may exceed them."""
        found = dict(sample)
        for path, parameter in self.free.items():
            if parameter.values is None:
                low, high = parameter.uniform or parameter.log_uniform or parameter.integers or WEIGHT_BOUNDS
                found[path] = min(max(found[path], low), high)
        return found

    def values(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe's values by path that a sample gives, with expressions computed and weights on their simplex.

        Weights are −log u of independent u, divided by their sum, which is uniform on the simplex.
        """
        values = {path: self._original(path, value) for path, value in sample.items()}
        for paths in self._simplices:
            shares = [-math.log(values[path]) for path in paths]
            values |= {path: share / sum(shares) for path, share in zip(paths, shares, strict=True)}
        waiting = {
            path: str(parameter.expression)
            for path, parameter in self.parameters.items()
            if parameter.expression is not None
        }
        while waiting:
            solved = {
                path: found for path, text in waiting.items() if (found := _solve(path, text, values)) is not None
            }
            if not solved:
                raise SearchSpaceError(
                    f"parameters.{next(iter(waiting))}: {next(iter(waiting.values()))!r} cannot be computed; known names: "
                    f"{', '.join(sorted(_names(values)))}"
                )
            values |= solved
            waiting = {path: text for path, text in waiting.items() if path not in solved}
        return {path: values[path] for path in self.parameters}

    def recipe(self, sample: Mapping[str, Any]) -> BaseRecipe:
        """Return the recipe with a sample's values."""
        return with_values(self._recipe, self.values(sample))

    @staticmethod
    def plain(value: Any) -> Any:
        """Return a choice in the form that searchers take: a list, such as a student's layers, as text."""
        return str(value) if isinstance(value, list) else value

    def _original(self, path: str, value: Any) -> Any:
        choices = self.parameters[path].values
        return value if choices is None else next((choice for choice in choices if self.plain(choice) == value), value)

    def _corners(self) -> Iterator[Sample]:
        """Yield the sample of lowest values, and for each parameter the samples with its other bounds or choices."""
        ends = {path: _ends(parameter) for path, parameter in self.free.items()}
        lowest = {path: values[0] for path, values in ends.items()}
        yield lowest
        for path, values in ends.items():
            for value in values[1:]:
                yield {**lowest, path: value}

    def _check_effects(self, corners: Sequence[BaseRecipe]) -> None:
        """Raise `SearchSpaceError` for a parameter that no recipe of the space reads."""
        unread = [experiment_of(recipe).unread_keys() for recipe in corners]
        for path in self.parameters:
            reasons = [next((why for key, why in keys.items() if is_inside(path, [key])), None) for keys in unread]
            if reasons and all(reasons):
                raise SearchSpaceError(f"parameters.{path} has no effect: {reasons[0]}; remove it from the space")

    def _members(self, path: str) -> list[str]:
        before, _, after = path.partition(".*.")
        entries: Any = self._recipe
        for key in before.split("."):
            entries = getattr(entries, key, None)
        if not isinstance(entries, list) or len(entries) < 2:
            raise SearchSpaceError(
                f"parameters.{path}: {before} of the recipe has fewer than two entries; a simplex needs two"
            )
        return [f"{before}.{number}.{after}" for number in range(len(entries))]

    def _check_path(self, path: str, sweep: Sweep) -> None:
        searched = self._recipe.searchable_keys
        parts = path.split(".")
        is_fixed_of_teacher = path.startswith("teachers.encoders.") and parts[-1] not in _SEARCHABLE_OF_TEACHER
        if is_fixed_of_teacher or not is_inside(path, searched):
            allowed = ", ".join(searched).replace("encoders", "encoders.N.alpha")
            raise SearchSpaceError(
                f"parameters.{path} cannot be searched: all trials share the corpus, the teachers' tables and the dev score; "
                f"search only {allowed}"
            )
        if parts[0] in ("training", "groups") and parts[-1] in _WITHOUT_EFFECT:
            raise SearchSpaceError(f"parameters.{path} does not affect what the student learns; set it in the recipe")
        may_change = is_inside(path, _CHANGEABLE_IN_TRAINING) and not is_inside(path, _FIXED_IN_TRAINING)
        if sweep.schedule.kind == "pbt" and not may_change:
            raise SearchSpaceError(
                f"parameters.{path} cannot change during training, as pbt requires; search "
                f"{', '.join(_CHANGEABLE_IN_TRAINING)} except {', '.join(_FIXED_IN_TRAINING)}, or write schedule.kind: asha"
            )


def _solve(path: str, text: str, values: Mapping[str, Any]) -> float | int | None:
    """Return an expression's value; None if it contains a name that is not known yet."""
    names = _names(values)
    for number, known_path in enumerate(sorted(values, key=len, reverse=True)):
        # Dots are not allowed in an expression's names.
        text = re.sub(rf"(?<![\w.]){re.escape(known_path)}(?![\w.])", f"parameter_{number}", text)
        names[f"parameter_{number}"] = values[known_path]
    try:
        found = simple_eval(text, names=names)
    except NameNotDefined:
        return None
    except (InvalidExpression, SyntaxError, ArithmeticError, TypeError) as wrong:
        raise SearchSpaceError(f"parameters.{path}: {text!r} is not arithmetic: {wrong}") from None
    if isinstance(found, float) and found.is_integer():
        return int(found)
    return found if isinstance(found, int | float) else None


def _names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by the last part of their paths, where that is unique."""
    last_parts = [path.rsplit(".", 1)[-1] for path in values]
    return {last: value for last, value in zip(last_parts, values.values(), strict=True) if last_parts.count(last) == 1}


def _ends(parameter: ParameterSection) -> list[Any]:
    if parameter.values is not None:
        return [*parameter.values]
    if parameter.simplex:
        return [0.5]
    return list(parameter.integers or parameter.uniform or parameter.log_uniform or [])
