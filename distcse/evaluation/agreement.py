"""Agreement between student and teachers, a score that needs no labels: do they rank sentences alike?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from distcse.evaluation.estimates import MeanOf
from distcse.evaluation.models import VectorModel
from distcse.evaluation.tasks import TaskResult


def agreement(student: NDArray[np.floating], similarities: NDArray[np.floating]) -> float:
    """Compute the mean Spearman correlation, times 100, between the student's and the teachers' similarity rows.

    Args:
        student: (n, d) unit vectors of n sentences, n ≥ 3.
        similarities: (n, n) the teachers' cosines of the same sentences.
    """
    return float(100 * agreement_per_sentence(student, similarities).mean())


def agreement_per_sentence(student: NDArray[np.floating], similarities: NDArray[np.floating]) -> NDArray[np.float64]:
    """Compute the (n,) Spearman correlations of the student's and the teachers' rows, without the diagonal; n ≥ 3.

    A constant row has no order; its correlation counts as 0.
    """
    off_diagonal = ~np.eye(len(similarities), dtype=bool)
    student_ranks = _centred_ranks((student @ student.T)[off_diagonal].reshape(len(similarities), -1))
    teacher_ranks = _centred_ranks(np.asarray(similarities)[off_diagonal].reshape(len(similarities), -1))
    scale = np.linalg.norm(student_ranks, axis=1) * np.linalg.norm(teacher_ranks, axis=1)
    products = (student_ranks * teacher_ranks).sum(axis=1)
    return np.asarray(np.divide(products, scale, out=np.zeros_like(products), where=scale > 0))


@dataclass(frozen=True)
class HeldOutVectors:
    """Vectors of sentences held out from training; `agreement_result` computes the score once all teachers are measured."""

    content_name: ClassVar[str] = "HeldOutVectors"

    texts: list[str]
    name: str = "held-out rows"
    suite: str = "agreement"
    pairs_only: bool = False

    def sentences(self) -> Iterable[str]:
        return self.texts

    def measure(self, model: VectorModel) -> TaskResult:
        """Return no score, and the (n, d) unit vectors as the detail `vectors`."""
        return TaskResult({}, {"vectors": model.unit_vectors(self.texts)})


def agreement_result(vectors: NDArray[np.floating], similarities: NDArray[np.floating]) -> TaskResult:
    """Compute the agreement of a model with the teachers on held-out rows.

    Args:
        vectors: (n, d) the model's unit vectors of n sentences, n ≥ 3.
        similarities: (n, n) the teachers' mixed similarities.

    Returns:
        The score `agreement`.
    """
    correlations = agreement_per_sentence(vectors, similarities)
    return TaskResult({"agreement": MeanOf(correlations, "agreement/held-out rows")}, {"sentences": len(vectors)})


def _centred_ranks(similarities: NDArray[np.floating]) -> NDArray[np.float64]:
    from scipy.stats import rankdata  # imported late, so that a run's first step does not wait 0.5 s for it

    ranks: NDArray[np.float64] = rankdata(similarities, axis=1)
    ranks -= ranks.mean(axis=1, keepdims=True)
    return ranks
