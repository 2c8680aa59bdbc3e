"""A search space over one recipe: what may be sampled, and which values of the recipe a sample comes to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from simpleeval import InvalidExpression, NameNotDefined, simple_eval

from distcse.errors import SearchSpaceError
from distcse.recipe import MutualRecipe, ParameterSection, Recipe, Sweep, with_values

Sample = dict[str, Any]
"""What a searcher chose, by name; for a knob that is a range or a choice the name is its path."""

WEIGHT_BOUNDS = (1e-6, 1 - 1e-6)
"""A weight of a simplex is −log u, with u drawn between these."""
_MAY_BE_SEARCHED = {
    Recipe: (
        "student",
        "teachers.encoders",
        "teachers.rank_noise_group",
        "teachers.disagreement_scale",
        "objective",
        "training",
    ),
    MutualRecipe: ("groups", "bi", "cross", "mutual"),
}
_OF_A_TEACHER = ("alpha",)
_NOT_LEARNED_FROM = ("workers", "cpus_per_worker", "gpus_per_worker", "max_failures", "log_every")
_FIXED_ON_THE_WAY = ("objective.rank.queue", "objective.regression.teachers", "objective.detection.generator")
_MAY_CHANGE_ON_THE_WAY = (
    "objective.",
    "training.lr",
    "training.weight_decay",
    "training.gradient_clipping",
    "teachers.",
)


class Space:
    """The knobs of a sweep on a recipe.

    Args:
        sweep: The knobs.
        recipe: What they belong to.

    Raises:
        RecipeError: A path is no knob of the recipe or must be the same in all trials, a bound is refused by the recipe, or a
            relation cannot be worked out.
    """

    def __init__(self, sweep: Sweep, recipe: Recipe | MutualRecipe) -> None:
        self._recipe = recipe
        self.parameters: dict[str, ParameterSection] = {}
        self._simplices: list[list[str]] = []
        for path, parameter in sweep.parameters.items():
            paths = self._members(path) if parameter.simplex else [path]
            if parameter.simplex:
                self._simplices.append(paths)
            for member in paths:
                if member in self.parameters:
                    raise SearchSpaceError(f"knobs.{member} is given twice")
                self._check_path(member, sweep)
                self.parameters[member] = parameter
        for sample in self._corners():
            self.recipe(sample)

    @property
    def free(self) -> dict[str, ParameterSection]:
        """The knobs that are chosen; the others follow from them."""
        return {path: parameter for path, parameter in self.parameters.items() if parameter.expression is None}

    @property
    def choices(self) -> dict[str, list[Any]]:
        """The values of each free knob that has a list of them, as searchers take them."""
        return {
            path: [self.plain(value) for value in parameter.values]
            for path, parameter in self.free.items()
            if parameter.values is not None
        }

    def grid(self) -> list[Sample]:
        """Every combination of the knobs' values."""
        choices = [[(path, value) for value in parameter.values or ()] for path, parameter in self.free.items()]
        return [dict(combination) for combination in itertools.product(*choices)]

    def distributions(self) -> dict[str, Any]:
        """Optuna's distribution of each free knob."""
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

    def draws(self, number: int, seed: int) -> list[Sample]:
        """Independent draws, the same for the same seed."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
        return [dict(study.ask(self.distributions()).params) for _ in range(number)]

    def clipped(self, sample: Sample) -> Sample:
        """A sample that was changed on the way, back between its bounds."""
        found = dict(sample)
        for path, parameter in self.free.items():
            if parameter.values is None:
                low, high = parameter.uniform or parameter.log_uniform or parameter.integers or WEIGHT_BOUNDS
                found[path] = min(max(found[path], low), high)
        return found

    def values(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe's values, by path, that a sample comes to: relations worked out, weights on their simplex.

        Weights are −log u of independent u, divided by their sum: every division is as likely as another.
        """
        values = {path: self._meant(path, value) for path, value in sample.items()}
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
                    f"knobs.{next(iter(waiting))}: {next(iter(waiting.values()))!r} cannot be worked out; known names: "
                    f"{', '.join(sorted(_names(values)))}"
                )
            values |= solved
            waiting = {path: text for path, text in waiting.items() if path not in solved}
        return {path: values[path] for path in self.parameters}

    def recipe(self, sample: Mapping[str, Any]) -> Recipe | MutualRecipe:
        """The recipe with a sample's values."""
        return with_values(self._recipe, self.values(sample))

    @staticmethod
    def plain(value: Any) -> Any:
        """A choice as searchers take it: a list, such as that of a student's layers, by its text."""
        return str(value) if isinstance(value, list) else value

    def _meant(self, path: str, value: Any) -> Any:
        choices = self.parameters[path].values
        return value if choices is None else next((choice for choice in choices if self.plain(choice) == value), value)

    def _corners(self) -> Iterator[Sample]:
        """The lowest of all knobs, and each knob's every end or choice beside it."""
        ends = {path: _ends(parameter) for path, parameter in self.free.items()}
        lowest = {path: values[0] for path, values in ends.items()}
        yield lowest
        for path, values in ends.items():
            for value in values[1:]:
                yield {**lowest, path: value}

    def _members(self, path: str) -> list[str]:
        before, _, after = path.partition(".*.")
        place: Any = self._recipe
        for key in before.split("."):
            place = getattr(place, key, None)
        if not isinstance(place, list) or len(place) < 2:
            raise SearchSpaceError(
                f"knobs.{path}: {before} of the recipe has fewer than two entries, so nothing to divide"
            )
        return [f"{before}.{number}.{after}" for number in range(len(place))]

    def _check_path(self, path: str, sweep: Sweep) -> None:
        searched = _MAY_BE_SEARCHED[type(self._recipe)]
        parts = path.split(".")
        of_a_teacher = path.startswith("teachers.encoders.") and parts[-1] not in _OF_A_TEACHER
        if of_a_teacher or not f"{path}.".startswith(tuple(f"{root}." for root in searched)):
            allowed = ", ".join(searched).replace("encoders", "encoders.N.alpha")
            raise SearchSpaceError(
                f"knobs.{path} must be the same in all trials: they share the text, the teachers' tables and the dev score. "
                f"What may be searched: {allowed}"
            )
        if parts[0] in ("training", "groups") and parts[-1] in _NOT_LEARNED_FROM:
            raise SearchSpaceError(f"knobs.{path} changes nothing that is learned; set it in the recipe")
        changes = path.startswith(_MAY_CHANGE_ON_THE_WAY) and not path.startswith(_FIXED_ON_THE_WAY)
        if sweep.schedule.kind == "pbt" and not changes:
            raise SearchSpaceError(
                f"knobs.{path} cannot change in the middle of a training, as pbt wants; such knobs: "
                f"{', '.join(_MAY_CHANGE_ON_THE_WAY)} but not {', '.join(_FIXED_ON_THE_WAY)}; or write schedule.kind: asha"
            )
        if sweep.schedule.kind == "pbt" and isinstance(self._recipe, Recipe):
            self._check_change(path, sweep.parameters.get(path), self._recipe)

    @staticmethod
    def _check_change(path: str, parameter: ParameterSection | None, recipe: Recipe) -> None:
        """What a checkpoint goes on with whatever the new values are, unless another knob of the recipe binds them."""
        rank = recipe.objective.rank
        if path.endswith(".alpha") and recipe.training.neighbor_batching is not None:
            raise SearchSpaceError(
                f"knobs.{path} cannot change in the middle of a training whose batches are grouped: who is near depends on it; "
                "write training.neighbor_batching: null, or schedule.kind: asha"
            )
        if (
            path == "objective.rank.gamma"
            and rank is not None
            and rank.queue is not None
            and parameter
            and 0 in _ends(parameter)
        ):
            raise SearchSpaceError(
                f"knobs.{path} cannot become 0 in the middle of a training with objective.rank.queue, which checkpoints hold; "
                "take 0 away, or write schedule.kind: asha"
            )


def _solve(path: str, text: str, values: Mapping[str, Any]) -> float | int | None:
    """The relation's value, or None where a name is not known (yet)."""
    names = _names(values)
    for number, whole in enumerate(sorted(values, key=len, reverse=True)):
        if whole in text:  # a path is no name in an expression
            text = text.replace(whole, f"knob_{number}")
            names[f"knob_{number}"] = values[whole]
    try:
        found = simple_eval(text, names=names)
    except NameNotDefined:
        return None
    except (InvalidExpression, SyntaxError, ArithmeticError, TypeError) as wrong:
        raise SearchSpaceError(f"knobs.{path}: {text!r} is no arithmetic: {wrong}") from None
    if isinstance(found, float) and found.is_integer():
        return int(found)
    return found if isinstance(found, int | float) else None


def _names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs by the last part of their paths, where no other ends the same."""
    lasts = [path.rsplit(".", 1)[-1] for path in values]
    return {last: value for last, value in zip(lasts, values.values(), strict=True) if lasts.count(last) == 1}


def _ends(parameter: ParameterSection) -> list[Any]:
    if parameter.values is not None:
        return [*parameter.values]
    if parameter.simplex:
        return [0.5]
    return list(parameter.integers or parameter.uniform or parameter.log_uniform or [])
