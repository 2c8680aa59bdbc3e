"""The median of paired ratios and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 2000


@dataclass(frozen=True)
class Spread:
    """A median and its bootstrap interval.

    Attributes:
        median: Of the pairs' values.
        low: Lower end of the 95 % interval of the median, pairs resampled.
        high: Its upper end.
        pairs: How many there are.
    """

    median: float
    low: float
    high: float
    pairs: int

    @property
    def noise(self) -> float:
        """Of an A/A run: how far from 1 its interval reaches. Bias counts as much as width."""
        return max(abs(self.low - 1), abs(self.high - 1))


def spread_of(values: Sequence[float], seed: int = 0) -> Spread:
    """The median of values, one a pair, and its 95 % interval. `ValueError` where there is none or one is no number."""
    found = np.asarray(values, dtype=np.float64)
    if not len(found) or not np.isfinite(found).all():
        raise ValueError(
            f"{len(found)} values, {np.isfinite(found).sum()} of them finite; a median needs one, all finite"
        )
    resampled = np.random.default_rng(seed).integers(0, len(found), (_RESAMPLES, len(found)))
    low, high = np.percentile(np.median(found[resampled], axis=1), [2.5, 97.5])
    return Spread(float(np.median(found)), float(low), float(high), len(found))
