"""Agreement between teachers on a corpus, measured before training on a sample of its sentences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from distcse.errors import ComparisonError
from distcse.events import Reporter, StageProgress
from distcse.recipe import Recipe
from distcse.teachers.kinds import kind_of
from distcse.teachers.table import VectorStatistics, effective_weights, measure_statistics
from distcse.text import Corpus

NEAREST = 10
_SHOWN = 5
_STREAM = 2**32 - 4
"""Random stream that draws the sentences, different from the seed's other streams."""


@dataclass(frozen=True)
class TeacherCard:
    """What one teacher brings into an ensemble."""

    teacher: int
    """Index of the teacher in the recipe."""
    dimension: int
    """Size of its vectors."""
    statistics: VectorStatistics
    """Statistics of its vectors of the sentences."""
    sentences_per_s: float
    """Speed of embedding the sentences on this machine, without loading the model."""
    weight: float
    """Share of its alpha in those of all compared teachers."""
    effective_weight: float
    """What it weighs in effect in a mean of cosines; see `effective_weights`."""


@dataclass(frozen=True)
class Pairing:
    """Agreement of two teachers."""

    first: int
    """Index of the first teacher in the recipe."""
    second: int
    kendall: float
    """Kendall's τ-b × 100 between both teachers' lists, mean over sentences."""
    overlap: float
    """Percentage of a sentence's ten nearest neighbors that both teachers share, mean over sentences."""


@dataclass(frozen=True)
class Disagreement:
    """A pair of sentences whose similarity the teachers judge differently."""

    one: str
    other: str
    cosines: list[float]
    """One per compared teacher, in the order of `TeacherComparison.compared`."""


@dataclass(frozen=True)
class TeacherComparison:
    """Result of `compare`."""

    sentences: int
    """Number of different sentences that were compared."""
    teachers: list[str]
    """Names of all teachers in the recipe."""
    compared: list[int]
    """Indices of the teachers that output vectors."""
    cards: list[TeacherCard]
    """One per compared teacher."""
    pairings: list[Pairing]
    disagreements: list[Disagreement]
    """The pairs with the largest range of standardized cosines, largest first."""


def compare(recipe: Recipe, corpus: Corpus, sentences: int, reporter: Reporter) -> TeacherComparison:
    """Embed a sample of different sentences with every teacher, and compare the similarity lists.

    Raises:
        ComparisonError: Fewer than two teachers output vectors, or there are fewer than twelve different sentences.
    """
    compared = comparable(recipe)
    if sentences < NEAREST + 2:
        raise ComparisonError(
            f"a comparison needs at least {NEAREST + 2} sentences, not {sentences}; raise --sentences"
        )
    drawn = np.random.default_rng([recipe.seed, _STREAM]).permutation(len(corpus))[: 2 * sentences]
    row_of = dict(zip(reversed(corpus.texts(drawn)), reversed(drawn.tolist()), strict=True))
    texts = list(dict.fromkeys(corpus.texts(drawn)))[:sentences]
    rows = np.array([row_of[text] for text in texts], dtype=np.int64)
    if len(texts) < NEAREST + 2:
        raise ComparisonError(
            f"the corpus has only {len(texts)} different sentences, a comparison needs {NEAREST + 2}; add sentences"
        )
    lists, statistics, seconds, dimensions = [], {}, {}, {}
    for number in compared:
        teacher = kind_of(recipe.teachers.encoders[number])
        embedder = teacher.open_embedder()
        started_at = time.perf_counter()
        progress = partial(reporter.advance, f"teacher {number}", total=len(texts), unit="sentences")
        units = corpus.encode(
            rows, partial(embedder.encode, normalize=True, precision=teacher.precision, on_progress=progress)
        )
        seconds[number] = time.perf_counter() - started_at
        del embedder  # frees its memory before the next is loaded
        lists.append(_drop_diagonal(units @ units.T))
        statistics[number], dimensions[number] = measure_statistics(units), units.shape[1]
        reporter.emit(StageProgress(f"teacher {number}", len(texts), len(texts), "sentences", finished=True))
    alphas = {number: recipe.teachers.encoders[number].alpha for number in compared}
    effective = effective_weights(alphas, statistics)
    cards = [
        TeacherCard(
            number,
            dimensions[number],
            statistics[number],
            len(texts) / seconds[number],
            alphas[number] / sum(alphas.values()),
            effective[number],
        )
        for number in compared
    ]
    pairings = [
        Pairing(compared[one], compared[other], kendall(lists[one], lists[other]), overlap(lists[one], lists[other]))
        for one, other in combinations(range(len(compared)), 2)
    ]
    names = [teacher.backbone for teacher in recipe.teachers.encoders]
    return TeacherComparison(len(texts), names, compared, cards, pairings, _find_disagreements(texts, lists))


def comparable(recipe: Recipe) -> list[int]:
    """Return the indices of the teachers that output vectors."""
    numbers = [number for number, teacher in enumerate(recipe.teachers.encoders) if kind_of(teacher).has_vectors]
    if len(numbers) < 2:
        raise ComparisonError(
            f"a comparison needs two teachers that output vectors, but teachers.encoders has {len(numbers)}; add one"
        )
    return numbers


def kendall(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """Compute the mean over sentences of Kendall's τ-b between two teachers' (n, m) lists, times 100."""
    from scipy.stats import kendalltau  # takes 0.5 s, which other commands save

    return float(100 * np.mean([kendalltau(a, b).statistic for a, b in zip(one, other, strict=True)]))


def overlap(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """Compute the percentage of nearest neighbors shared by two teachers' (n, m) lists, mean over sentences."""
    ours, theirs = (np.argpartition(-lists, NEAREST - 1, axis=1)[:, :NEAREST] for lists in (one, other))
    return float(100 * np.mean([len(np.intersect1d(a, b)) / NEAREST for a, b in zip(ours, theirs, strict=True)]))


def _drop_diagonal(cosines: NDArray[np.float32]) -> NDArray[np.float32]:
    """Drop the diagonal of an (n, n) matrix: (n, n - 1) lists of the other sentences."""
    count = len(cosines)
    return cosines[~np.eye(count, dtype=bool)].reshape(count, count - 1)


def _find_disagreements(texts: Sequence[str], lists: Sequence[NDArray[np.float32]]) -> list[Disagreement]:
    """Find the pairs with the largest range of standardized cosines; a sentence occurs in one pair at most."""
    standardized = np.stack([(part - part.mean()) / max(float(part.std()), 1e-6) for part in lists])
    spread = np.ptp(standardized, axis=0)
    found: list[Disagreement] = []
    used: set[int] = set()
    for index in np.argsort(-spread, axis=None)[: 50 * _SHOWN]:
        row, column = divmod(int(index), spread.shape[1])
        other = column + (column >= row)
        if len(found) == _SHOWN:
            break
        if used & {row, other}:
            continue
        used |= {row, other}
        found.append(Disagreement(texts[row], texts[other], [float(part[row, column]) for part in lists]))
    return found
