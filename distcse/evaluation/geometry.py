"""Geometry of the sentence space: alignment, uniformity, how cosines spread, and the pairs that are hard to tell apart.

Alignment is E‖f(x) − f(x⁺)‖² over positive pairs, uniformity log E exp(−2‖f(x) − f(y)‖²) over unordered pairs of different
sentences, both on unit vectors (Wang and Isola 2020, α = t = 2). As in SimCSE, the positive pairs are those with a gold
score above 4, the sentences all of the set. Lower is better for both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.evaluation.estimates import Estimate, Fixed, MeanOf, SpearmanOf
from distcse.evaluation.models import VectorModel
from distcse.evaluation.sts import ScoredPairs
from distcse.evaluation.tasks import TaskResult

POSITIVE_ABOVE = 4.0
GROUPS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
SIMILAR_FROM = 10 / 3
"""RankEncoder §5.4: the top third of the scale from 0 to 5."""
_EDGES = np.linspace(-1.0, 1.0, 81)
_ENOUGH = 3


def alignment(first: NDArray[np.floating], second: NDArray[np.floating]) -> NDArray[np.float64]:
    """(n,) squared distances of n pairs of unit vectors, each (n, d)."""
    return np.asarray(((first - second).astype(np.float64) ** 2).sum(axis=1))


def uniformity(vectors: NDArray[np.floating]) -> float:
    """Log of the mean Gaussian potential over unordered pairs of (n, d) unit vectors; no vector with itself."""
    distances = torch.pdist(torch.from_numpy(np.ascontiguousarray(vectors)).double())
    return float(torch.logsumexp(-2 * distances.square(), dim=0) - np.log(len(distances)))


@dataclass(frozen=True)
class GeometryTask:
    """Alignment, uniformity and the similar pairs of one set scored from 0 to 5."""

    pairs: ScoredPairs
    suite: str = "geometry"
    pairs_only: bool = False

    @property
    def name(self) -> str:
        return self.pairs.name

    def sentences(self) -> Iterable[str]:
        return self.pairs.unique

    def measure(self, model: VectorModel) -> TaskResult:
        """Figures alignment, uniformity, similar (Spearman among similar pairs); histograms by gold group in the details."""
        pairs = self.pairs
        cosines = model.similarities(pairs.first, pairs.second)
        figures: dict[str, Estimate] = {}
        positive = np.flatnonzero(pairs.gold > POSITIVE_ABOVE)
        if len(positive):
            first, second = (model.unit_vectors([side[i] for i in positive]) for side in (pairs.first, pairs.second))
            figures["alignment"] = MeanOf(alignment(first, second), f"positive/{self.name}", scale=1.0)
        figures["uniformity"] = Fixed(uniformity(model.unit_vectors(pairs.unique)))
        similar = pairs.gold >= SIMILAR_FROM
        if similar.sum() >= _ENOUGH and np.ptp(pairs.gold[similar]) > 0:
            figures["similar"] = SpearmanOf(cosines[similar], pairs.gold[similar], f"similar/{self.name}")
        return TaskResult(figures, {"cosines": _by_group(cosines, pairs.gold)})


def _by_group(cosines: NDArray[np.floating], gold: NDArray[np.float64]) -> list[dict[str, object]]:
    """Histogram, mean and quartiles of the cosines of each group of gold scores; the last group holds its upper end."""
    group = np.clip(np.searchsorted(GROUPS, gold, side="right") - 1, 0, len(GROUPS) - 2)
    found: list[dict[str, object]] = []
    for place in range(len(GROUPS) - 1):
        mine = cosines[group == place]
        if not len(mine):
            continue
        found.append(
            {
                "gold": [GROUPS[place], GROUPS[place + 1]],
                "pairs": len(mine),
                "mean": float(mine.mean()),
                "quartiles": np.percentile(mine, [25, 50, 75]).tolist(),
                "histogram": np.histogram(np.clip(mine, -1, 1), bins=_EDGES)[0].tolist(),
            }
        )
    return found
