"""A figure together with what it was computed from, so that it can be computed again on resampled items.

The paired bootstrap draws items (sentence pairs, test examples, queries) with replacement, the same for both models, and
looks at how their difference varies (Efron and Tibshirani 1993, ch. 13; Koehn 2004).
A resample is a row of weights: how often each item was drawn. So no item is copied, and a thousand resamples of a rank
correlation are a few matrix operations instead of a thousand sorts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float64]
"""(R, n): how often each of n items was drawn in each of R resamples."""

RESAMPLES = 1000
_WEIGHTS_AT_A_TIME = 4_000_000
"""32 MB, of which a rank correlation has half a dozen."""


class Estimate(Protocol):
    """One figure of one model."""

    @property
    def value(self) -> float:
        """The figure on all items."""
        ...

    @property
    def resampled(self) -> NDArray[np.float64] | None:
        """(RESAMPLES,) the figure on resampled items, the same items for every model; None where it has none."""
        ...


@dataclass(frozen=True)
class Fixed:
    """A figure that has no items to draw from, such as uniformity."""

    value: float

    @property
    def resampled(self) -> None:
        return None


@dataclass(frozen=True)
class MeanOf:
    """Mean of a value an item, times `scale`: accuracy, recall, mean τ over lists."""

    values: NDArray[np.float64]
    items: str
    """Name of the set of items: what makes two models' resamples the same."""
    scale: float = 100.0

    @property
    def value(self) -> float:
        return float(self.scale * self.values.mean())

    @cached_property
    def resampled(self) -> NDArray[np.float64]:
        return resample(self.items, len(self.values), lambda w: self.scale * (w @ self.values) / len(self.values))


@dataclass(frozen=True)
class SpearmanOf:
    """Spearman's correlation, times 100, of predictions and gold scores."""

    predicted: NDArray[np.floating]
    gold: NDArray[np.float64]
    items: str

    @cached_property
    def value(self) -> float:
        return spearman(self.predicted, self.gold)

    @cached_property
    def resampled(self) -> NDArray[np.float64]:
        return resample(self.items, len(self.gold), self._figures)

    def _figures(self, weights: Weights) -> NDArray[np.float64]:
        ours, theirs = weighted_ranks(self.predicted, weights), weighted_ranks(self.gold, weights)
        return 100 * _weighted_pearson(ours, theirs, weights)


@dataclass(frozen=True)
class AucOf:
    """Area under the ROC curve, times 100, of predictions for labels 0 and 1."""

    predicted: NDArray[np.floating]
    labels: NDArray[np.int64]
    items: str

    @cached_property
    def value(self) -> float:
        from sklearn.metrics import roc_auc_score

        return float(100 * roc_auc_score(self.labels, self.predicted))

    @cached_property
    def resampled(self) -> NDArray[np.float64]:
        return resample(self.items, len(self.labels), self._figures)

    def _figures(self, weights: Weights) -> NDArray[np.float64]:
        """By the Mann-Whitney statistic: the mean rank of the positives says how many negatives they beat."""
        ranks, positive = weighted_ranks(self.predicted, weights), weights * (self.labels == 1)
        count = positive.sum(axis=1)
        beaten = (positive * ranks).sum(axis=1) - count * (count + 1) / 2
        pairs = count * (weights.sum(axis=1) - count)  # 0 where a resample holds one label alone: no figure
        return np.asarray(100 * np.divide(beaten, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0))


@dataclass(frozen=True)
class ReportedEstimate:
    """A figure as its protocol rounds it; resampled as what it was rounded from."""

    value: float
    exact: Estimate

    @property
    def resampled(self) -> NDArray[np.float64] | None:
        return self.exact.resampled


@dataclass(frozen=True)
class AverageOf:
    """Unweighted mean of figures over sets, each rounded to two decimals first as the papers' tables do."""

    parts: Sequence[Estimate]

    @property
    def value(self) -> float:
        return float(np.mean([round(part.value, 2) for part in self.parts]))

    @cached_property
    def resampled(self) -> NDArray[np.float64] | None:
        drawn = [part.resampled for part in self.parts]
        present = [values for values in drawn if values is not None]
        return np.asarray(np.mean(present, axis=0)) if len(present) == len(drawn) else None


@dataclass(frozen=True)
class Difference:
    """By how much one model's figure is above another's, and where 95 % of the paired resamples lie."""

    value: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def difference(ours: Estimate, theirs: Estimate) -> Difference | None:
    """The paired bootstrap's percentile interval of ours minus theirs; None where a figure cannot be resampled."""
    a, b = ours.resampled, theirs.resampled
    if a is None or b is None:
        return None
    low, high = np.nanpercentile(a - b, [2.5, 97.5])
    return Difference(ours.value - theirs.value, float(low), float(high))


def spearman(predicted: NDArray[np.floating], gold: NDArray[np.float64]) -> float:
    """Spearman's correlation, times 100; 0 where either side has no order."""
    from scipy.stats import spearmanr  # half a second, which a run's first step need not wait for

    if len(gold) < 2 or np.ptp(predicted) == 0 or np.ptp(gold) == 0:
        return 0.0
    return float(100 * spearmanr(predicted, gold).statistic)


def resample(items: str, count: int, figures: Callable[[Weights], NDArray[np.float64]]) -> NDArray[np.float64]:
    """(RESAMPLES,) a figure on resamples of so many items, always the same for the same items.

    Args:
        items: Name of the set of items.
        count: n.
        figures: (R, n) weights -> (R,) figures. It is given a few resamples at a time where there are many items.
    """
    generator, found = np.random.default_rng(zlib.crc32(items.encode())), []
    at_a_time = max(1, _WEIGHTS_AT_A_TIME // max(1, count))
    for begin in range(0, RESAMPLES, at_a_time):
        drawn = [generator.integers(0, count, count) for _ in range(min(at_a_time, RESAMPLES - begin))]
        found.append(figures(np.stack([np.bincount(places, minlength=count) for places in drawn]).astype(np.float64)))
    return np.concatenate(found)


def weighted_ranks(values: NDArray[np.floating], weights: Weights) -> NDArray[np.float64]:
    """(R, n) the ranks, counted from 1, that each of n values has among R resamples of them.

    Equal values share the mean of their places, as in scipy's rankdata. An item that was not drawn gets a rank that no
    weight multiplies.
    """
    order = np.argsort(values, kind="stable")
    in_order = weights[:, order]
    begins = np.flatnonzero(np.diff(values[order], prepend=np.nan) != 0)
    drawn = np.add.reduceat(in_order, begins, axis=1)
    middle = np.cumsum(drawn, axis=1) - drawn + (drawn + 1) / 2
    sizes = np.diff(begins, append=len(values))
    ranks = np.empty_like(in_order)
    ranks[:, order] = np.repeat(middle, sizes, axis=1)
    return ranks


def _weighted_pearson(x: NDArray[np.float64], y: NDArray[np.float64], weights: Weights) -> NDArray[np.float64]:
    total = weights.sum(axis=1, keepdims=True)
    x = x - (weights * x).sum(axis=1, keepdims=True) / total
    y = y - (weights * y).sum(axis=1, keepdims=True) / total
    spread = np.sqrt((weights * x * x).sum(axis=1) * (weights * y * y).sum(axis=1))
    return np.asarray(np.divide((weights * x * y).sum(axis=1), spread, out=np.zeros(len(x)), where=spread > 0))
