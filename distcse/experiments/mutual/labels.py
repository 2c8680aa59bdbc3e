"""Combination of the groups' scores into the labels that all groups train on (Trans-Encoder §2.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distcse.recipe import GroupSection, MutualSection

PAIRS_PER_PART = 200_000
"""Pairs whose scores are combined together, which limits the memory: 8 bytes per pair and array, and a copy."""

_LEAST_RHO = 0.01
"""Correlation of a model that is no better than chance, in its weight; and how far one stays from 1."""


def combine(scores: Sequence[NDArray[np.floating]], weights: Sequence[float], standardize: bool) -> NDArray[np.float32]:
    """Combine the (n,) scores of G models into (n,) labels, their weighted mean.

    Args:
        scores: An array per group, or two with `mutual.learn_from: both`, which may be memory-mapped: raw cosines of bi-encoders
            or sigmoid outputs of cross-encoders, not logits.
        weights: Their weights in the mean; their scale does not matter.
        standardize: Whether to give the models' scores the same mean and standard deviation before.
    """
    number = len(scores[0])
    bands = _bands(scores, weights) if standardize else None
    labels = np.empty(number, dtype=np.float32)
    parts = -(-number // PAIRS_PER_PART)
    for part in range(parts):
        rows = slice(number * part // parts, number * (part + 1) // parts)
        table = np.stack([group_scores[rows] for group_scores in scores]).astype(np.float64)
        labels[rows] = np.average(table if bands is None else bands.align(table), axis=0, weights=weights)
    return labels


def to_band(labels: NDArray[np.float32], cosines: NDArray[np.floating]) -> NDArray[np.float32]:
    """Give (n,) labels the mean and standard deviation of (n,) cosines of the same pairs, and clip them to [-1, 1]."""
    (mean, deviation), (wanted_mean, wanted_deviation) = map(_mean_and_deviation, (labels, cosines))
    scale = wanted_deviation / deviation if deviation > 0 else 1.0
    return ((labels - mean) * scale + wanted_mean).clip(-1, 1).astype(np.float32)


def score_weight(section: MutualSection, group: GroupSection, dev: float | None) -> float:
    """Return the weight of a model's scores in the labels (`mutual.weigh_by`).

    Args:
        section: The cycles' section of the recipe.
        group: The model's group.
        dev: The model's dev score; None only where weights do not depend on it.
    """
    if section.weigh_by == "group":
        return group.weight
    assert dev is not None
    return group.weight * dev_weight(dev)


def dev_weight(score: float) -> float:
    """Return the weight ρ / (1 - ρ²) of a model's standardized scores, from its dev score 100 ρ.

    With ρ the correlation of the scores with the truth, and independent errors, the mean with these weights has the highest
    correlation that a weighted mean of the scores can have.
    """
    rho = min(max(score / 100, _LEAST_RHO), 1 - _LEAST_RHO)
    return rho / (1 - rho * rho)


@dataclass(frozen=True)
class _Bands:
    """Means and standard deviations (G, 1) of the groups' scores over all pairs, and the mean and deviation to give them all."""

    means: NDArray[np.float64]
    deviations: NDArray[np.float64]
    mean: float
    deviation: float

    def align(self, table: NDArray[np.float64]) -> NDArray[np.float64]:
        """Give each group's scores in a (G, n) table the same mean and standard deviation."""
        return (table - self.means) / self.deviations * self.deviation + self.mean


def _bands(scores: Sequence[NDArray[np.floating]], weights: Sequence[float]) -> _Bands:
    means, deviations = np.array([_mean_and_deviation(group_scores) for group_scores in scores]).T.copy()
    mean, deviation = (float(np.average(values, weights=weights)) for values in (means, deviations))
    deviations[deviations == 0] = 1.0  # equal scores stay equal
    return _Bands(means[:, None], deviations[:, None], mean, deviation)


def _mean_and_deviation(scores: NDArray[np.floating]) -> tuple[float, float]:
    return float(scores.mean(dtype=np.float64)), float(scores.std(dtype=np.float64))
