"""How much of the trials' differences each knob explains: Optuna's fANOVA over what the trials came to."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from distcse.tuning.records import Trial
from distcse.tuning.space import Space

_FEWEST = 4
"""Fewer trials explain nothing."""


def importances(space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """Share of the variance of the best dev scores by knob, the greatest first; empty where there are too few trials.

    Knobs that follow from others are left out. Trials stopped early count with what they had: as in the search.
    """
    import optuna
    from optuna.distributions import FloatDistribution

    ended = [trial for trial in trials if trial.status in ("finished", "stopped") and not trial.recalled_from]
    told = [(trial, trial.best) for trial in ended if trial.best]
    if len(told) < _FEWEST or len({best.score for _, best in told}) == 1:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    weights = {path: FloatDistribution(0.0, 1.0) for path, parameter in space.free.items() if parameter.simplex}
    distributions = {**space.distributions(), **weights}
    study = optuna.create_study(direction="maximize")
    for trial, best in told:
        values = {path: space.plain(trial.values[path]) for path in distributions}
        study.add_trial(optuna.create_trial(params=values, distributions=distributions, value=best.score))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {path: float(share) for path, share in found.items()}
