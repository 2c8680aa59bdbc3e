"""Geometry of the embedding space: alignment, uniformity, the distribution of cosines, and the ranking of similar pairs.

Alignment is E‖f(x) − f(x⁺)‖² over positive pairs. Uniformity is log E exp(−2‖f(x) − f(y)‖²) over unordered pairs of
different sentences. Both use unit vectors (Wang and Isola 2020, α = t = 2); lower is better. As in SimCSE, positive pairs
have a gold score above 4, and the sentences are all of the set.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.evaluation.bootstrap import Estimate, Fixed, MeanOf, SpearmanOf
from distcse.evaluation.models import VectorModel
from distcse.evaluation.tasks import TaskResult
from distcse.evaluation.tasks.sts import ScoredPairs

POSITIVE_ABOVE = 4.0
GROUPS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
SIMILAR_FROM = 10 / 3
"""RankEncoder §5.4: the top third of the scale from 0 to 5."""
_EDGES = np.linspace(-1.0, 1.0, 81)
_MIN_PAIRS = 3


def alignment(first: NDArray[np.floating], second: NDArray[np.floating]) -> NDArray[np.float64]:
    """Compute the (n,) squared distances of n pairs of unit vectors, each (n, d)."""
    return np.asarray(((first - second).astype(np.float64) ** 2).sum(axis=1))


def uniformity(vectors: NDArray[np.floating]) -> float:
    """Compute the log of the mean Gaussian potential over the unordered pairs of (n, d) unit vectors."""
    distances = torch.pdist(torch.from_numpy(np.ascontiguousarray(vectors)).double())
    return float(torch.logsumexp(-2 * distances.square(), dim=0) - np.log(len(distances)))


@dataclass(frozen=True)
class GeometryTask:
    """Alignment, uniformity and ranking of similar pairs, for one set with gold scores from 0 to 5."""

    content_name: ClassVar[str] = "GeometryTask"
    pairs: ScoredPairs
    suite: str = "geometry"
    pairs_only: bool = False

    @property
    def name(self) -> str:
        return self.pairs.name

    def sentences(self) -> Iterable[str]:
        return self.pairs.unique

    def measure(self, model: VectorModel) -> TaskResult:
        """Measure `alignment`, `uniformity` and `similar` (Spearman among similar pairs); details have histograms of cosines."""
        pairs = self.pairs
        cosines = model.similarities(pairs.first, pairs.second)
        scores: dict[str, Estimate] = {}
        positive = np.flatnonzero(pairs.gold > POSITIVE_ABOVE)
        if len(positive):
            first, second = (model.unit_vectors([side[i] for i in positive]) for side in (pairs.first, pairs.second))
            scores["alignment"] = MeanOf(alignment(first, second), f"positive/{self.name}", scale=1.0)
        scores["uniformity"] = Fixed(uniformity(model.unit_vectors(pairs.unique)))
        similar = pairs.gold >= SIMILAR_FROM
        if similar.sum() >= _MIN_PAIRS and np.ptp(pairs.gold[similar]) > 0:
            scores["similar"] = SpearmanOf(cosines[similar], pairs.gold[similar], f"similar/{self.name}")
        return TaskResult(scores, {"cosines": _histograms(cosines, pairs.gold)})


def _histograms(cosines: NDArray[np.floating], gold: NDArray[np.float64]) -> list[dict[str, object]]:
    """Compute histogram, mean and quartiles of the cosines per interval of gold scores; the last interval is closed."""
    group = np.clip(np.searchsorted(GROUPS, gold, side="right") - 1, 0, len(GROUPS) - 2)
    found: list[dict[str, object]] = []
    for number in range(len(GROUPS) - 1):
        in_group = cosines[group == number]
        if not len(in_group):
            continue
        found.append(
            {
                "gold": [GROUPS[number], GROUPS[number + 1]],
                "pairs": len(in_group),
                "mean": float(in_group.mean()),
                "quartiles": np.percentile(in_group, [25, 50, 75]).tolist(),
                "histogram": np.histogram(np.clip(in_group, -1, 1), bins=_EDGES)[0].tolist(),
            }
        )
    return found
