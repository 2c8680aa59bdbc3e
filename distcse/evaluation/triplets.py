"""Triplets: is an anchor more similar to its positive than to its negative?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from distcse.evaluation.estimates import MeanOf
from distcse.evaluation.models import PairModel
from distcse.evaluation.tables import Table
from distcse.evaluation.tasks import TaskResult


@dataclass(frozen=True)
class TripletTask:
    """Accuracy, in percent: the share of triplets whose positive is more similar to the anchor; a tie counts as wrong."""

    content_name: ClassVar[str] = "TripletTask"
    name: str = field(compare=False)
    anchors: list[str]
    positives: list[str]
    negatives: list[str]
    suite: str = "triplets"
    pairs_only: bool = True

    @classmethod
    def of(cls, name: str, table: Table) -> TripletTask:
        """Read columns anchor, positive, negative.

        Raises:
            EvaluationFormatError: A column is missing.
        """
        return cls(name, table.texts("anchor"), table.texts("positive"), table.texts("negative"))

    def sentences(self) -> Iterable[str]:
        return [*self.anchors, *self.positives, *self.negatives]

    def measure(self, model: PairModel) -> TaskResult:
        """Measure `accuracy`."""
        near, far = (model.similarities(self.anchors, others) for others in (self.positives, self.negatives))
        correct = (near > far).astype(np.float64)
        return TaskResult({"accuracy": MeanOf(correct, f"triplets/{self.name}")}, {"triplets": len(correct)})
