"""What every protocol gives: a task knows the texts it needs and turns a model's answers into figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from distcse.evaluation.estimates import Estimate
from distcse.evaluation.models import Model, VectorModel


@dataclass(frozen=True)
class TaskResult:
    """Figures of one model on one set, the one that tables show first; and what pictures are drawn from."""

    figures: Mapping[str, Estimate]
    details: Mapping[str, Any] = field(default_factory=dict)


class EvalTask(Protocol):
    """One set under one protocol."""

    @property
    def suite(self) -> str:
        """Which table it stands in."""
        ...

    @property
    def name(self) -> str:
        """The set."""
        ...

    @property
    def pairs_only(self) -> bool:
        """Whether a cross-encoder, which has no vectors, can do it."""
        ...

    def sentences(self) -> Iterable[str]:
        """Every text that will be asked for."""
        ...

    def measure(self, model: Any) -> TaskResult:
        """The figures of a model: a `Model` where `pairs_only`, else a `VectorModel`."""
        ...


def can_do(task: EvalTask, model: Model) -> bool:
    """Whether a model can be measured on a task at all."""
    return task.pairs_only or isinstance(model, VectorModel)
