"""Semantic textual similarity: Spearman correlation of similarity and gold score (references: SentEval, as modified by SimCSE).

`all` is one correlation over the concatenation of a year's subsets: the protocol of SimCSE and of later papers. SentEval's
own `mean` and `wmean` over the subsets' correlations are other quantities; never mix them with `all` in one table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EvaluationFormatError
from distcse.evaluation.bootstrap import Estimate, Fixed, SpearmanOf, spearman
from distcse.evaluation.models import PairModel
from distcse.evaluation.tables import Table
from distcse.evaluation.tasks import TaskResult
from distcse.storage import content_key

Aggregate = Literal["all", "mean", "wmean"]
AGGREGATES: tuple[Aggregate, ...] = ("all", "mean", "wmean")


@dataclass(frozen=True)
class ScoredPairs:
    """Sentence pairs with gold scores, and the subset that each pair is from."""

    content_name: ClassVar[str] = "ScoredPairs"
    name: str = field(compare=False)
    first: list[str]
    second: list[str]
    gold: NDArray[np.float64]
    subsets: NDArray[np.str_]

    @classmethod
    def of(cls, name: str, table: Table) -> ScoredPairs:
        """Read columns score, sentence1, sentence2 and, optionally, subset."""
        subsets = table.columns.get("subset", [""] * len(table))
        pairs = cls(name, table.texts("sentence1"), table.texts("sentence2"), table.numbers("score"), np.array(subsets))
        if len(table) < 2 or np.ptp(pairs.gold) == 0:
            raise EvaluationFormatError(
                f"{table.file} has {len(table)} pairs and one distinct score; add pairs with another score"
            )
        return pairs

    @property
    def fingerprint(self) -> str:
        """Hash of the pairs, their order, scores and subsets."""
        return content_key(self)

    @cached_property
    def unique(self) -> list[str]:
        """Distinct sentences, in order of occurrence."""
        return list(dict.fromkeys([*self.first, *self.second]))


@dataclass(frozen=True)
class StsTask:
    """Spearman correlation, times 100, on one set."""

    content_name: ClassVar[str] = "StsTask"
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
        """Measure `all`, `mean` and `wmean`; details have the correlations of the subsets."""
        pairs = self.pairs
        predicted = model.similarities(pairs.first, pairs.second)
        subsets = subset_correlations(predicted, pairs)
        sizes = [count for count, _ in subsets.values()]
        correlations = [score for _, score in subsets.values()]
        scores: dict[str, Estimate] = {
            "all": SpearmanOf(predicted, pairs.gold, f"sts/{self.name}"),
            "mean": Fixed(float(np.mean(correlations))),
            "wmean": Fixed(float(np.average(correlations, weights=sizes))),
        }
        order = sorted(scores, key=lambda name: name != self.aggregate)
        return TaskResult({name: scores[name] for name in order}, {"subsets": subsets})


def sts_score(model: PairModel, pairs: ScoredPairs) -> float:
    """Compute the Spearman correlation, times 100, over all pairs."""
    return spearman(model.similarities(pairs.first, pairs.second), pairs.gold)


def subset_correlations(predicted: NDArray[np.floating], pairs: ScoredPairs) -> dict[str, tuple[int, float]]:
    """Compute size and Spearman correlation, times 100, of each subset, in the file's order; 0 if a subset is constant."""
    found = {}
    for subset in dict.fromkeys(pairs.subsets.tolist()):
        in_subset = pairs.subsets == subset
        found[subset] = (int(in_subset.sum()), spearman(predicted[in_subset], pairs.gold[in_subset]))
    return found
