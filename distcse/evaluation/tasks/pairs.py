"""Classification of pairs by similarity: paraphrases (QQP, MRPC) and answers (QNLI), as in Trans-Encoder §4.1; and triplets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EvaluationFormatError
from distcse.evaluation.bootstrap import AucOf, MeanOf
from distcse.evaluation.models import PairModel
from distcse.evaluation.tables import Table
from distcse.evaluation.tasks import TaskResult


@dataclass(frozen=True)
class PairClassificationTask:
    """Area under the ROC curve, times 100, of similarities for labels 0 and 1."""

    content_name: ClassVar[str] = "PairClassificationTask"
    name: str = field(compare=False)
    first: list[str]
    second: list[str]
    labels: NDArray[np.int64]
    suite: str = "pairs"
    pairs_only: bool = True

    @classmethod
    def of(cls, name: str, table: Table) -> PairClassificationTask:
        """Read columns label (0 or 1), sentence1, sentence2."""
        labels = table.binary("label")
        if len(set(labels.tolist())) < 2:
            raise EvaluationFormatError(
                f"{table.file} has only the label {labels[0]}; add rows with the other of 0 and 1"
            )
        return cls(name, table.texts("sentence1"), table.texts("sentence2"), labels)

    def sentences(self) -> Iterable[str]:
        return [*self.first, *self.second]

    def measure(self, model: PairModel) -> TaskResult:
        """Measure `auc`."""
        return TaskResult(
            {"auc": AucOf(model.similarities(self.first, self.second), self.labels, f"pairs/{self.name}")}
        )


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
        """Read columns anchor, positive, negative."""
        return cls(name, table.texts("anchor"), table.texts("positive"), table.texts("negative"))

    def sentences(self) -> Iterable[str]:
        return [*self.anchors, *self.positives, *self.negatives]

    def measure(self, model: PairModel) -> TaskResult:
        """Measure `accuracy`."""
        near, far = (model.similarities(self.anchors, others) for others in (self.positives, self.negatives))
        correct = (near > far).astype(np.float64)
        return TaskResult({"accuracy": MeanOf(correct, f"triplets/{self.name}")}, {"triplets": len(correct)})
