"""Importance of a sweep's parameters: Optuna's fANOVA over the trials' best dev scores."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from distcse.tuning.records import Trial
from distcse.tuning.space import Space

_MIN_TRIALS = 4
"""Fewer trials give no importances."""


def importances(space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """Return the fraction of the best dev scores' variance that each parameter explains, the largest first.

    Parameters with an expression are left out. A trial that was stopped early counts with its best score, as in the search.

    Returns:
        Fractions by recipe path; empty with fewer than 4 trials or equal scores.

    Source: fANOVA, Hutter et al. 2014.
    """
    import optuna
    from optuna.distributions import FloatDistribution

    ended = [trial for trial in trials if trial.status in ("finished", "stopped") and not trial.reused_from]
    scored = [(trial, trial.best) for trial in ended if trial.best]
    if len(scored) < _MIN_TRIALS or len({best.score for _, best in scored}) == 1:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    weights = {path: FloatDistribution(0.0, 1.0) for path, parameter in space.free.items() if parameter.simplex}
    distributions = {**space.distributions(), **weights}
    study = optuna.create_study(direction="maximize")
    for trial, best in scored:
        values = {path: space.plain(trial.values[path]) for path in distributions}
        study.add_trial(optuna.create_trial(params=values, distributions=distributions, value=best.score))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {path: float(share) for path, share in found.items()}
