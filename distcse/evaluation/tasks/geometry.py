"""Geometry of the embedding space: alignment, uniformity, and the ranking of similar pairs.

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
SIMILAR_FROM = 10 / 3
"""RankEncoder §5.4: the top third of the scale from 0 to 5."""
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
        """Measure `alignment`, `uniformity` and `similar` (Spearman correlation among similar pairs)."""
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
        return TaskResult(scores)
