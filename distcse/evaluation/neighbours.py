"""What a student sees differently: sentences whose nearest neighbour is another one than before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distcse.evaluation.models import Model, VectorModel
from distcse.evaluation.tasks import EvalTask

_SHOWN = 12
_MOST = 5000


@dataclass(frozen=True)
class Changed:
    """A sentence, its nearest neighbour under one model, and under another."""

    sentence: str
    before: str
    after: str
    gained: float
    """By how much the second model holds `after` closer than `before`, in cosine."""


@dataclass(frozen=True)
class Changes:
    """The clearest changes, and how many there are."""

    sentences: int
    changed: int
    clearest: list[Changed]


class Neighbourhoods:
    """What models see in the first 5,000 different sentences of a set: their vectors, so that no model is held.

    Args:
        texts: The sentences; of fewer than two nothing is seen.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = list(dict.fromkeys(texts))[:_MOST]
        self._seen: dict[str, NDArray[np.float32]] = {}

    @classmethod
    def of(cls, tasks: Sequence[EvalTask]) -> Neighbourhoods:
        """In the sentences of STS-B, or else of the first set."""
        chosen = sorted(tasks, key=lambda task: task.name != "STS-B")
        return cls(chosen[0].sentences() if chosen else [])

    def look(self, name: str, model: Model) -> None:
        """Note what a model sees, if it gives vectors."""
        if isinstance(model, VectorModel) and len(self._texts) > 1:
            self._seen[name] = model.unit_vectors(self._texts)

    def changes(self, base: str) -> dict[str, Changes]:
        """How the others' neighbours differ from those of one; nothing where that one gives no vectors."""
        if base not in self._seen:
            return {}
        before = self._seen[base]
        return {
            name: changed_neighbours(before, after, self._texts) for name, after in self._seen.items() if name != base
        }


def changed_neighbours(before: NDArray[np.floating], after: NDArray[np.floating], texts: Sequence[str]) -> Changes:
    """Compare nearest neighbours by two (n, d) arrays of unit vectors of n texts, n ≥ 2."""
    old = _cosines(before).argmax(axis=1)
    cosines = _cosines(after)
    new = cosines.argmax(axis=1)
    rows = np.arange(len(texts))
    gained = np.where(old == new, -np.inf, cosines[rows, new] - cosines[rows, old])
    changed = int((old != new).sum())
    clearest = np.argsort(-gained, kind="stable")[: min(_SHOWN, changed)]
    return Changes(
        len(texts),
        changed,
        [Changed(texts[row], texts[old[row]], texts[new[row]], float(gained[row])) for row in clearest],
    )


def _cosines(vectors: NDArray[np.floating]) -> NDArray[np.floating]:
    cosines: NDArray[np.floating] = vectors @ vectors.T
    np.fill_diagonal(cosines, -np.inf)
    return cosines
