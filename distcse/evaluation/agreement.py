"""Does the student order sentences as its teachers do? The score where nothing is labelled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distcse.evaluation.estimates import MeanOf
from distcse.evaluation.models import VectorModel
from distcse.evaluation.tasks import TaskResult


def agreement(student: NDArray[np.floating], lists: NDArray[np.floating]) -> float:
    """Mean Spearman correlation, times 100, between the student's and the teachers' similarity lists.

    Args:
        student: (n, d) unit vectors of n sentences.
        lists: (n, n) cosines of the teachers for the same sentences.
    """
    return float(100 * agreements(student, lists).mean())


def agreements(student: NDArray[np.floating], lists: NDArray[np.floating]) -> NDArray[np.float64]:
    """(n,) Spearman correlation of each sentence's list, which is its row without itself; n ≥ 3.

    A constant list has no order and counts as 0.
    """
    others = ~np.eye(len(lists), dtype=bool)
    ours = _centred_ranks((student @ student.T)[others].reshape(len(lists), -1))
    theirs = _centred_ranks(np.asarray(lists)[others].reshape(len(lists), -1))
    scale = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    products = (ours * theirs).sum(axis=1)
    return np.asarray(np.divide(products, scale, out=np.zeros_like(products), where=scale > 0))


@dataclass(frozen=True)
class AgreementTask:
    """Agreement with the teachers' mixed lists on sentences nobody was trained on."""

    texts: list[str]
    lists: NDArray[np.floating]
    """(n, n) mixed cosines of the teachers."""
    name: str = "held-out rows"
    suite: str = "agreement"
    pairs_only: bool = False

    def sentences(self) -> Iterable[str]:
        return self.texts

    def measure(self, model: VectorModel) -> TaskResult:
        """Figure agreement."""
        each = agreements(model.unit_vectors(self.texts), self.lists)
        return TaskResult({"agreement": MeanOf(each, f"agreement/{self.name}")}, {"sentences": len(self.texts)})


def _centred_ranks(lists: NDArray[np.floating]) -> NDArray[np.float64]:
    from scipy.stats import rankdata  # half a second, which a run's first step need not wait for

    ranks: NDArray[np.float64] = rankdata(lists, axis=1)
    ranks -= ranks.mean(axis=1, keepdims=True)
    return ranks
