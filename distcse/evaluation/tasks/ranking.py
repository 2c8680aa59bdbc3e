"""Ranking quality (RankCSE, appendix G): does a model rank the partners of a sentence as annotators do?

The paper publishes no code; this is the definition used here. Two sentences that form a pair of the set are partners. A
sentence, in either column, with more than three distinct partners is a query; its partners with their gold scores are its
list. KCC is Kendall's τ-b of similarities and gold scores. NDCG takes the gold score as the gain (linear), discounts rank r
by log2(r + 1), and averages over the orders of tied similarities. Both are means over lists, times 100. Lists with equal
gold scores are left out. The subsets of a year are pooled. A repeated pair counts with the mean of its scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EvaluationFormatError
from distcse.evaluation.bootstrap import MeanOf
from distcse.evaluation.models import PairModel
from distcse.evaluation.tasks import TaskResult
from distcse.evaluation.tasks.sts import ScoredPairs

MIN_PARTNERS = 4


@dataclass(frozen=True)
class RankedList:
    """A query, its partners and their gold scores."""

    query: str
    candidates: list[str]
    gold: NDArray[np.float64]


def ranked_lists(pairs: ScoredPairs) -> list[RankedList]:
    """Collect the lists of a set of scored pairs, in the order of their queries' first row."""
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for first, second, gold in zip(pairs.first, pairs.second, pairs.gold.tolist(), strict=True):
        if first != second:
            scores[first][second].append(gold)
            scores[second][first].append(gold)
    lists = [
        RankedList(query, list(partners), np.array([np.mean(golds) for golds in partners.values()]))
        for query, partners in scores.items()
        if len(partners) >= MIN_PARTNERS
    ]
    return [entry for entry in lists if np.ptp(entry.gold) > 0]


def kendall(similarities: NDArray[np.floating], gold: NDArray[np.float64]) -> float:
    """Compute Kendall's τ-b of one list; 0 if all similarities are equal."""
    from scipy.stats import kendalltau  # imported late, so that a run's first step does not wait 0.5 s for it

    return 0.0 if np.ptp(similarities) == 0 else float(kendalltau(similarities, gold).statistic)


def ndcg(similarities: NDArray[np.floating], gold: NDArray[np.float64]) -> float:
    """Compute the normalized discounted cumulative gain of one list, with the gold scores as gains."""
    from sklearn.metrics import ndcg_score

    return float(ndcg_score(gold[None], np.asarray(similarities)[None]))


@dataclass(frozen=True)
class RankingTask:
    """KCC and NDCG, times 100, over the lists of one set."""

    content_name: ClassVar[str] = "RankingTask"
    pairs: ScoredPairs
    suite: str = "ranking"
    pairs_only: bool = True

    def __post_init__(self) -> None:
        if (lowest := self.pairs.gold.min(initial=0.0)) < 0:
            raise EvaluationFormatError(
                f"ranking {self.name}: a score is {lowest:g}, but NDCG needs gains of at least 0; shift the scores"
            )

    @property
    def name(self) -> str:
        return self.pairs.name

    @cached_property
    def lists(self) -> list[RankedList]:
        return ranked_lists(self.pairs)

    def sentences(self) -> Iterable[str]:
        return [text for entry in self.lists for text in (entry.query, *entry.candidates)]

    def measure(self, model: PairModel) -> TaskResult:
        """Measure `kcc` and `ndcg`; details have the number of lists."""
        queries: Sequence[str] = [entry.query for entry in self.lists for _ in entry.candidates]
        partners = [partner for entry in self.lists for partner in entry.candidates]
        ends = np.cumsum([len(entry.candidates) for entry in self.lists])[:-1]
        ranked = list(zip(np.split(model.similarities(queries, partners), ends), self.lists, strict=True))
        return TaskResult(
            {
                "kcc": MeanOf(np.array([kendall(mine, entry.gold) for mine, entry in ranked]), f"lists/{self.name}"),
                "ndcg": MeanOf(np.array([ndcg(mine, entry.gold) for mine, entry in ranked]), f"lists/{self.name}"),
            },
            {"lists": len(self.lists)},
        )
