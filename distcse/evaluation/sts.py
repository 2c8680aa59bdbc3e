"""Semantic textual similarity: Spearman of similarity and gold score (references: SentEval as SimCSE changed it).

`all` is one correlation over the concatenation of a year's subsets, SimCSE's protocol and the papers' since. SentEval's own
`mean` and `weighted mean` over the subsets' correlations are other numbers, never to be mixed with it in one table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from distcse.errors import InsufficientLabelsError
from distcse.evaluation.estimates import Estimate, Fixed, SpearmanOf, spearman
from distcse.evaluation.models import PairModel
from distcse.evaluation.tables import Table
from distcse.evaluation.tasks import TaskResult
from distcse.files import text_checksum

Aggregate = Literal["all", "mean", "wmean"]
AGGREGATES: tuple[Aggregate, ...] = ("all", "mean", "wmean")


@dataclass(frozen=True)
class ScoredPairs:
    """Sentence pairs with gold scores, and the subset each comes from."""

    name: str
    first: list[str]
    second: list[str]
    gold: NDArray[np.float64]
    subsets: NDArray[np.str_]

    @classmethod
    def of(cls, name: str, table: Table) -> ScoredPairs:
        """From columns score, sentence1, sentence2 and, where there is one, subset."""
        subsets = table.columns.get("subset", [""] * len(table))
        pairs = cls(name, table.texts("sentence1"), table.texts("sentence2"), table.numbers("score"), np.array(subsets))
        if len(table) < 2 or np.ptp(pairs.gold) == 0:
            raise InsufficientLabelsError(
                f"{table.file} holds {len(table)} pairs of one score; a correlation needs two scores"
            )
        return pairs

    @property
    def fingerprint(self) -> str:
        """Of the pairs, their order and their scores."""
        return text_checksum(json.dumps([self.first, self.second, self.gold.tolist()]))

    @cached_property
    def unique(self) -> list[str]:
        """Each sentence once."""
        return list(dict.fromkeys([*self.first, *self.second]))


@dataclass(frozen=True)
class StsTask:
    """Spearman, times 100, on one set.

    Args:
        pairs: The set.
        aggregate: Which figure stands first, in tables.
    """

    pairs: ScoredPairs
    aggregate: Aggregate = "all"
    suite: str = "sts"
    pairs_only: bool = True

    @property
    def name(self) -> str:
        return self.pairs.name

    def sentences(self) -> Iterable[str]:
        return self.pairs.unique

    def measure(self, model: PairModel) -> TaskResult:
        """Figures all, mean, wmean; the subsets' own correlations in the details."""
        pairs = self.pairs
        predicted = model.similarities(pairs.first, pairs.second)
        subsets = subset_correlations(predicted, pairs)
        sizes = [count for count, _ in subsets.values()]
        scores = [score for _, score in subsets.values()]
        figures: dict[str, Estimate] = {
            "all": SpearmanOf(predicted, pairs.gold, f"sts/{self.name}"),
            "mean": Fixed(float(np.mean(scores))),
            "wmean": Fixed(float(np.average(scores, weights=sizes))),
        }
        order = sorted(figures, key=lambda name: name != self.aggregate)
        return TaskResult({name: figures[name] for name in order}, {"subsets": subsets})


def sts_score(model: PairModel, pairs: ScoredPairs) -> float:
    """Spearman, times 100, over all pairs."""
    return spearman(model.similarities(pairs.first, pairs.second), pairs.gold)


def subset_correlations(predicted: NDArray[np.floating], pairs: ScoredPairs) -> dict[str, tuple[int, float]]:
    """Size and Spearman, times 100, of each subset, in the file's order; of one that has no order, 0."""
    found = {}
    for subset in dict.fromkeys(pairs.subsets.tolist()):
        mine = pairs.subsets == subset
        found[subset] = (int(mine.sum()), spearman(predicted[mine], pairs.gold[mine]))
    return found
