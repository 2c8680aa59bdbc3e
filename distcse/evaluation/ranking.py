"""Ranking quality (RankCSE appendix G): does a model order the partners of a sentence as people do?

The paper publishes no code; the definition here: two sentences that a set's rows pair are partners; a sentence, in either
column, with more than three different partners is a query, and its partners with their gold scores are its list. KCC is
Kendall's τ-b of similarities and gold scores; NDCG takes the gold score itself as the gain (linear), discounts place r by
log2(r + 1) and averages over the orders of tied similarities. Both are means over lists, times 100. A list whose gold
scores are all equal has no order and is left out. Subsets of a year are pooled. A pair that is scored twice counts with the
mean of its scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EvaluationFormatError
from distcse.evaluation.estimates import MeanOf
from distcse.evaluation.models import PairModel
from distcse.evaluation.sts import ScoredPairs
from distcse.evaluation.tasks import TaskResult

PARTNERS = 4


@dataclass(frozen=True)
class RankedList:
    """A query, its partners and their gold scores."""

    query: str
    candidates: list[str]
    gold: NDArray[np.float64]


def ranked_lists(pairs: ScoredPairs) -> list[RankedList]:
    """The lists in a set of scored pairs, in the order of their queries' first row."""
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for first, second, gold in zip(pairs.first, pairs.second, pairs.gold.tolist(), strict=True):
        if first != second:
            scores[first][second].append(gold)
            scores[second][first].append(gold)
    lists = [
        RankedList(query, list(partners), np.array([np.mean(golds) for golds in partners.values()]))
        for query, partners in scores.items()
        if len(partners) >= PARTNERS
    ]
    return [entry for entry in lists if np.ptp(entry.gold) > 0]


def kendall(similarities: NDArray[np.floating], gold: NDArray[np.float64]) -> float:
    """Kendall's τ-b of one list; 0 where all similarities are equal."""
    from scipy.stats import kendalltau  # half a second, which a run's first step need not wait for

    return 0.0 if np.ptp(similarities) == 0 else float(kendalltau(similarities, gold).statistic)


def ndcg(similarities: NDArray[np.floating], gold: NDArray[np.float64]) -> float:
    """Normalised discounted cumulative gain of one list, gain = gold score."""
    from sklearn.metrics import ndcg_score

    return float(ndcg_score(gold[None], np.asarray(similarities)[None]))


@dataclass(frozen=True)
class RankingTask:
    """KCC and NDCG, times 100, over the lists of one set."""

    pairs: ScoredPairs
    suite: str = "ranking"
    pairs_only: bool = True

    def __post_init__(self) -> None:
        if (lowest := self.pairs.gold.min(initial=0.0)) < 0:
            raise EvaluationFormatError(
                f"ranking {self.name}: a score is {lowest:g}, and NDCG takes scores for gains; write scores of 0 and more"
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
        """Figures kcc and ndcg; the number of lists in the details."""
        queries: Sequence[str] = [entry.query for entry in self.lists for _ in entry.candidates]
        partners = [partner for entry in self.lists for partner in entry.candidates]
        ends = np.cumsum([len(entry.candidates) for entry in self.lists])[:-1]
        each = list(zip(np.split(model.similarities(queries, partners), ends), self.lists, strict=True))
        return TaskResult(
            {
                "kcc": MeanOf(np.array([kendall(mine, entry.gold) for mine, entry in each]), f"lists/{self.name}"),
                "ndcg": MeanOf(np.array([ndcg(mine, entry.gold) for mine, entry in each]), f"lists/{self.name}"),
            },
            {"lists": len(self.lists)},
        )
