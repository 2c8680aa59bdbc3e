"""What a student sees differently: sentences whose nearest neighbour is another one than before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distcse.evaluation.models import VectorModel

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


def changed_neighbours(before: VectorModel, after: VectorModel, texts: Sequence[str]) -> Changes:
    """Compare nearest neighbours, by cosine, among the first 5,000 different texts; at least two of them."""
    texts = list(dict.fromkeys(texts))[:_MOST]
    old = _cosines(before.unit_vectors(texts)).argmax(axis=1)
    cosines = _cosines(after.unit_vectors(texts))
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
