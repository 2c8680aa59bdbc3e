"""Nearest neighbors that differ between two models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distcse.evaluation.models import Model, VectorModel
from distcse.evaluation.tasks import EvalTask

_MAX_SHOWN = 12
_MAX_SENTENCES = 5000


@dataclass(frozen=True)
class NeighborChange:
    """A sentence whose nearest neighbor differs between two models."""

    sentence: str
    before: str
    after: str
    cosine_gain: float
    """Cosine to `after` minus cosine to `before`, under the second model."""


@dataclass(frozen=True)
class NeighborChanges:
    """The number of changed nearest neighbors, and the changes with the largest gains."""

    sentences: int
    changed: int
    examples: list[NeighborChange]


class NeighborComparison:
    """Compares models by their vectors of up to 5,000 distinct sentences, so that models need not stay in memory.

    Args:
        texts: The sentences; with fewer than two, there is nothing to compare.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = list(dict.fromkeys(texts))[:_MAX_SENTENCES]

    @classmethod
    def of(cls, tasks: Sequence[EvalTask]) -> NeighborComparison:
        """Take the sentences of STS-B, or of the first set."""
        chosen = sorted(tasks, key=lambda task: task.name != "STS-B")
        return cls(chosen[0].sentences() if chosen else [])

    def vectors(self, model: Model) -> NDArray[np.float32] | None:
        """Return a model's (n, d) unit vectors of the sentences; None for a cross-encoder, which has none."""
        return model.unit_vectors(self._texts) if isinstance(model, VectorModel) and len(self._texts) > 1 else None

    def changes(self, vectors: Mapping[str, NDArray[np.float32] | None], base: str) -> dict[str, NeighborChanges]:
        """Compare the other models' neighbors with those of `base`; empty if `base` has no vectors.

        Args:
            vectors: By model: what `vectors` returned.
            base: Name of the model to compare with.
        """
        before = vectors.get(base)
        if before is None:
            return {}
        return {
            name: changed_neighbors(before, after, self._texts)
            for name, after in vectors.items()
            if after is not None and name != base
        }


def changed_neighbors(
    before: NDArray[np.floating], after: NDArray[np.floating], texts: Sequence[str]
) -> NeighborChanges:
    """Compare the nearest neighbors of n texts between two (n, d) arrays of unit vectors, n ≥ 2."""
    old = cosines_to_others(before).argmax(axis=1)
    cosines = cosines_to_others(after)
    new = cosines.argmax(axis=1)
    rows = np.arange(len(texts))
    cosine_gain = np.where(old == new, -np.inf, cosines[rows, new] - cosines[rows, old])
    changed = int((old != new).sum())
    examples = np.argsort(-cosine_gain, kind="stable")[: min(_MAX_SHOWN, changed)]
    return NeighborChanges(
        len(texts),
        changed,
        [NeighborChange(texts[row], texts[old[row]], texts[new[row]], float(cosine_gain[row])) for row in examples],
    )


def cosines_to_others(vectors: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the (n, n) cosines of n unit vectors, with -inf in place of each one's with itself."""
    cosines: NDArray[np.floating] = vectors @ vectors.T
    np.fill_diagonal(cosines, -np.inf)
    return cosines
