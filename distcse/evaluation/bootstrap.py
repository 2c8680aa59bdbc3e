"""Estimates: a score together with the items that it was computed from, so that it can be computed on resampled items.

The paired bootstrap draws items (sentence pairs, test examples, queries) with replacement, the same for both models, and
measures how their difference varies (Efron and Tibshirani 1993, ch. 13; Koehn 2004).
A resample is a row of weights: how often each item was drawn. No item is copied, so a thousand resamples of a rank
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
WEIGHTS_PER_BLOCK = 4_000_000
"""32 MB; computing a rank correlation keeps about six arrays of this size."""


class Estimate(Protocol):
    """One score of one model."""

    @property
    def value(self) -> float:
        """The score on all items."""
        ...

    @property
    def resampled(self) -> NDArray[np.float64] | None:
        """(RESAMPLES,) scores on resampled items, the same items for every model; None if the score has no items."""
        ...


@dataclass(frozen=True)
class Fixed:
    """A score without items to resample, such as uniformity."""

    value: float

    @property
    def resampled(self) -> None:
        return None


@dataclass(frozen=True)
class MeanOf:
    """Mean of one value per item, times `scale`: accuracy, recall, mean τ over lists."""

    values: NDArray[np.float64]
    items: str
    """Name of the set of items; equal names get equal resamples."""
    scale: float = 100.0

    @property
    def value(self) -> float:
        return float(self.scale * self.values.mean())

    @cached_property
    def resampled(self) -> NDArray[np.float64]:
        return resample(self.items, len(self.values), lambda w: self.scale * (w @ self.values) / len(self.values))


@dataclass(frozen=True)
class _CorrelationOf:
    """A correlation of predictions and gold scores."""

    predicted: NDArray[np.floating]
    gold: NDArray[np.float64]
    items: str
    """Name of the set of items; equal names get equal resamples."""

    @cached_property
    def resampled(self) -> NDArray[np.float64]:
        return resample(self.items, len(self.gold), self._compute)

    def _compute(self, weights: Weights) -> NDArray[np.float64]:
        raise NotImplementedError


@dataclass(frozen=True)
class SpearmanOf(_CorrelationOf):
    """Spearman correlation, times 100, of predictions and gold scores."""

    @cached_property
    def value(self) -> float:
        return spearman(self.predicted, self.gold)

    def _compute(self, weights: Weights) -> NDArray[np.float64]:
        ours, theirs = weighted_ranks(self.predicted, weights), weighted_ranks(self.gold, weights)
        return 100 * _weighted_pearson(ours, theirs, weights)


@dataclass(frozen=True)
class PearsonOf(_CorrelationOf):
    """Pearson correlation, times 100, of predictions and gold scores; 0 if a side is constant."""

    @cached_property
    def value(self) -> float:
        return float(self._compute(np.ones((1, len(self.gold))))[0])

    def _compute(self, weights: Weights) -> NDArray[np.float64]:
        ours, theirs = (np.asarray(values, dtype=np.float64)[None, :] for values in (self.predicted, self.gold))
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
        return resample(self.items, len(self.labels), self._compute)

    def _compute(self, weights: Weights) -> NDArray[np.float64]:
        """Compute the Mann-Whitney statistic: the mean rank of the positives gives the number of negatives below them."""
        ranks, positive = weighted_ranks(self.predicted, weights), weights * (self.labels == 1)
        count = positive.sum(axis=1)
        wins = (positive * ranks).sum(axis=1) - count * (count + 1) / 2
        pairs = count * (weights.sum(axis=1) - count)  # 0 where a resample has one label only: NaN
        return np.asarray(100 * np.divide(wins, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0))


@dataclass(frozen=True)
class AverageOf:
    """Unweighted mean of scores over sets, each rounded to two decimals first, as in the papers' tables."""

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
class Interval:
    """A value with the 95 % percentile interval of the bootstrap."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, resampled: NDArray[np.float64]) -> Interval:
        """Take the interval from the (RESAMPLES,) values on resampled items."""
        low, high = np.nanpercentile(resampled, [2.5, 97.5])
        return cls(value, float(low), float(high))

    @property
    def is_significant(self) -> bool:
        """Whether the interval of a difference excludes 0."""
        return self.low > 0 or self.high < 0


def difference(ours: Estimate, theirs: Estimate) -> Interval | None:
    """Compute ours minus theirs by the paired bootstrap; None if a score cannot be resampled."""
    a, b = ours.resampled, theirs.resampled
    return None if a is None or b is None else Interval.of(ours.value - theirs.value, a - b)


def ratio(ours: Estimate, theirs: Estimate) -> Interval | None:
    """Compute ours in percent of theirs by the paired bootstrap; None without resamples, or if theirs are not all above 0."""
    a, b = ours.resampled, theirs.resampled
    if a is None or b is None or not min(theirs.value, b.min()) > 0:
        return None
    return Interval.of(100 * ours.value / theirs.value, 100 * a / b)


def spearman(predicted: NDArray[np.floating], gold: NDArray[np.float64]) -> float:
    """Compute the Spearman correlation, times 100; 0 if a side is constant."""
    from scipy.stats import spearmanr  # imported late, so that a run's first step does not wait 0.5 s for it

    if len(gold) < 2 or np.ptp(predicted) == 0 or np.ptp(gold) == 0:
        return 0.0
    return float(100 * spearmanr(predicted, gold).statistic)


def resample(items: str, count: int, compute: Callable[[Weights], NDArray[np.float64]]) -> NDArray[np.float64]:
    """Compute the (RESAMPLES,) scores on resamples of n items, always the same resamples for the same name.

    Args:
        items: Name of the set of items.
        count: n.
        compute: Maps (R, n) weights to (R,) scores; called with blocks of resamples to limit memory.
    """
    generator, blocks = np.random.default_rng(zlib.crc32(items.encode())), []
    block_size = max(1, WEIGHTS_PER_BLOCK // max(1, count))
    for start in range(0, RESAMPLES, block_size):
        drawn = [generator.integers(0, count, count) for _ in range(min(block_size, RESAMPLES - start))]
        blocks.append(
            compute(np.stack([np.bincount(indices, minlength=count) for indices in drawn]).astype(np.float64))
        )
    return np.concatenate(blocks)


def weighted_ranks(values: NDArray[np.floating], weights: Weights) -> NDArray[np.float64]:
    """Compute the (R, n) ranks, from 1, of n values within each of R resamples.

    Equal values share their mean rank, as in `scipy.stats.rankdata`. The rank of an item that was not drawn is arbitrary:
    its weight is 0.
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
    scale = np.sqrt((weights * x * x).sum(axis=1) * (weights * y * y).sum(axis=1))
    return np.asarray(np.divide((weights * x * y).sum(axis=1), scale, out=np.zeros(len(x)), where=scale > 0))
