"""How far teachers agree on a text: before hours of training, a minute that says who adds what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from distcse.data import Corpus
from distcse.errors import ComparisonError
from distcse.recipe import Recipe
from distcse.teachers.factory import open_embedder, scores_pairs

NEAREST = 10
_SHOWN = 5
_STREAM = 2**32 - 4
"""Of the sentences' draw, beside other draws of the seed."""


@dataclass(frozen=True)
class Pairing:
    """Two teachers."""

    first: int
    """Number of a teacher in the recipe."""
    second: int
    kendall: float
    """Mean Kendall's τ-b × 100 of their lists of a sentence."""
    overlap: float
    """Percentage of a sentence's ten nearest that both name."""


@dataclass(frozen=True)
class Disagreement:
    """A pair of sentences on which teachers differ."""

    one: str
    other: str
    cosines: list[float]
    """One a teacher that was compared."""


@dataclass(frozen=True)
class TeacherComparison:
    """What a preview found."""

    sentences: int
    teachers: list[str]
    """All of the recipe."""
    compared: list[int]
    """Numbers of those that give vectors."""
    pairings: list[Pairing]
    disputes: list[Disagreement]
    """Where standardised cosines are farthest apart."""


def compare(recipe: Recipe, corpus: Corpus, sentences: int, post: Callable[[int, int], None]) -> TeacherComparison:
    """Embed some different sentences of a corpus by every teacher, and compare the lists.

    Args:
        recipe: Its teachers, and the seed that draws the sentences.
        corpus: The user's text.
        sentences: How many.
        post: Told a teacher's number and the sentences it is through.

    Raises:
        TeacherError: Fewer than two teachers that give vectors, or fewer than twelve different sentences.
    """
    compared = comparable(recipe)
    if sentences < NEAREST + 2:
        raise ComparisonError(f"a comparison wants {NEAREST + 2} sentences or more, not {sentences}")
    drawn = np.random.default_rng([recipe.seed, _STREAM]).permutation(len(corpus))[: 2 * sentences]
    texts = list(dict.fromkeys(corpus.texts(drawn)))[:sentences]
    if len(texts) < NEAREST + 2:
        raise ComparisonError(f"the corpus has {len(texts)} different sentences; a comparison wants {NEAREST + 2}")
    lists = []
    for number in compared:
        teacher = recipe.teachers.encoders[number]
        units = open_embedder(teacher).encode(texts, normalize=True, precision=teacher.forward_precision)
        lists.append(_others(units @ units.T))
        post(number, len(texts))
    pairings = [
        Pairing(compared[one], compared[other], kendall(lists[one], lists[other]), overlap(lists[one], lists[other]))
        for one, other in combinations(range(len(compared)), 2)
    ]
    names = [teacher.backbone for teacher in recipe.teachers.encoders]
    return TeacherComparison(len(texts), names, compared, pairings, _disputes(texts, lists))


def comparable(recipe: Recipe) -> list[int]:
    """Numbers of the teachers that give vectors. `TeacherError` where fewer than two do."""
    numbers = [number for number, teacher in enumerate(recipe.teachers.encoders) if not scores_pairs(teacher)]
    if len(numbers) < 2:
        raise ComparisonError(f"a comparison wants two teachers that give vectors, the recipe has {len(numbers)}")
    return numbers


def kendall(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """(n, m) lists of two teachers -> mean Kendall's τ-b of a sentence's two lists, times 100."""
    from scipy.stats import kendalltau  # half a second, for commands that do not compare

    return float(100 * np.mean([kendalltau(a, b).statistic for a, b in zip(one, other, strict=True)]))


def overlap(one: NDArray[np.floating], other: NDArray[np.floating], nearest: int = NEAREST) -> float:
    """(n, m) lists of two teachers -> percentage of a sentence's nearest that both name, a mean over sentences."""
    ours, theirs = (np.argpartition(-lists, nearest - 1, axis=1)[:, :nearest] for lists in (one, other))
    return float(100 * np.mean([len(np.intersect1d(a, b)) / nearest for a, b in zip(ours, theirs, strict=True)]))


def _others(cosines: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, n) -> (n, n - 1): each sentence's list without itself."""
    count = len(cosines)
    return cosines[~np.eye(count, dtype=bool)].reshape(count, count - 1)


def _disputes(texts: Sequence[str], lists: Sequence[NDArray[np.float32]]) -> list[Disagreement]:
    """The pairs on which standardised cosines are farthest apart; each sentence in one of them at most."""
    standard = np.stack([(part - part.mean()) / max(float(part.std()), 1e-6) for part in lists])
    apart = np.ptp(standard, axis=0)
    found: list[Disagreement] = []
    met: set[int] = set()
    for place in np.argsort(-apart, axis=None)[: 50 * _SHOWN]:
        row, column = divmod(int(place), apart.shape[1])
        other = column + (column >= row)
        if len(found) == _SHOWN:
            break
        if met & {row, other}:
            continue
        met |= {row, other}
        found.append(Disagreement(texts[row], texts[other], [float(part[row, column]) for part in lists]))
    return found
