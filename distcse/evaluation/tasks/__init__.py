"""The interface of all evaluation tasks: a task names the texts it needs, and computes scores from a model's output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from distcse.evaluation.bootstrap import Estimate
from distcse.evaluation.models import Model, VectorModel


@dataclass(frozen=True)
class TaskResult:
    """Scores of one model on one set."""

    scores: Mapping[str, Estimate]
    """By measure; tables show the first one."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Data for plots."""


class EvalTask(Protocol):
    """One set, measured by one protocol."""

    content_name: ClassVar[str]
    """Name of the class in `content_key`, by which recorded fingerprints of test sets and stored results are found."""

    @property
    def suite(self) -> str:
        """Name of the suite whose table contains the task."""
        ...

    @property
    def name(self) -> str:
        """Name of the set."""
        ...

    @property
    def pairs_only(self) -> bool:
        """Whether the task needs similarities of pairs only, so that cross-encoders, which have no vectors, are supported."""
        ...

    def sentences(self) -> Iterable[str]:
        """List all texts that `measure` will request."""
        ...

    def measure(self, model: Any) -> TaskResult:
        """Compute the scores of a model: a `PairModel` if `pairs_only`, else a `VectorModel`."""
        ...


def supports(task: EvalTask, model: Model) -> bool:
    """Whether a model can be evaluated on a task."""
    return task.pairs_only or isinstance(model, VectorModel)
