"""The teachers as an ensemble on the dev sets, without a student: what each adds, and the weights that fit best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from distcse.errors import ComparisonError
from distcse.evaluation import LabelledDev, read_dev
from distcse.events import Reporter, StageProgress
from distcse.recipe import Recipe, TeacherSection
from distcse.storage import ArtifactStore, open_store
from distcse.teachers.comparison import comparable
from distcse.teachers.embedding import embed_texts
from distcse.teachers.table import SAMPLE, measure_statistics

_FACTORS = np.exp2(np.linspace(-2, 2, 17))
"""Factors that a fit tries on one teacher's weight, the others' fixed: a quarter to four times, in quarter octaves."""
_ROUNDS = 8
"""Most passes of a fit over all teachers."""
_LEAST_GAIN = 0.01
"""A fit ends when a pass over all teachers raises the score by less."""


@dataclass(frozen=True)
class Weighting:
    """T weights of an ensemble's teachers, and its dev score with them."""

    name: str
    """`recipe`; `equal spread`: the recipe's, divided by the spreads of the teachers' cosines; or `fitted` to the dev sets."""
    alphas: list[float]
    score: float


@dataclass(frozen=True)
class EnsembleScores:
    """What an ensemble of teachers scores on the dev sets, without a student."""

    metric: str
    """Name of the dev score."""
    teachers: list[int]
    """Indices of its T teachers in the recipe."""
    alone: list[float]
    """Dev score of each teacher."""
    losses_without: list[float]
    """By how much the score with the recipe's weights falls without each teacher; negative where it rises."""
    weightings: list[Weighting]
    """Weights in the mean of their cosines: `recipe`, `equal spread` and, if weights were fitted, `fitted`."""


def require_labelled_dev(recipe: Recipe) -> LabelledDev:
    """Read the labeled dev sets that weights are fitted to."""
    if (dev := _published_dev(recipe)) is None:
        raise ComparisonError(
            "--fit-weights needs a published dev set of scored pairs; write evaluation.dev=stsb and evaluation.data=FOLDER "
            "(with sts/stsb/dev.tsv.gz)"
        )
    return dev


def _published_dev(recipe: Recipe) -> LabelledDev | None:
    """Read the recipe's dev sets; None if it has none, or a set of the user's."""
    dev = read_dev(recipe)
    return dev if isinstance(dev, LabelledDev) else None


def score_ensemble(recipe: Recipe, fits_weights: bool, reporter: Reporter) -> EnsembleScores | None:
    """Score the recipe's teachers as an ensemble on its labeled dev sets; None if it has none."""
    numbers = comparable(recipe)
    dev = require_labelled_dev(recipe) if fits_weights else _published_dev(recipe)
    if dev is None:
        return None
    teachers = [recipe.teachers.encoders[number] for number in numbers]
    cache = open_store(recipe.storage.cache)
    ensemble = DevEnsemble.of(dev, dict(zip(numbers, teachers, strict=True)), cache, reporter)
    alphas = [teacher.alpha for teacher in teachers]
    balanced = [alpha / spread for alpha, spread in zip(alphas, ensemble.spreads, strict=True)]
    weights = {"recipe": alphas, "equal spread": balanced}
    if fits_weights:
        weights["fitted"] = ensemble.fit(balanced)
    return EnsembleScores(
        dev.name,
        numbers,
        [ensemble.score(row) for row in np.eye(len(teachers))],
        ensemble.losses_without(alphas),
        [Weighting(name, _with_mean_one(each), ensemble.score(each)) for name, each in weights.items()],
    )


class DevEnsemble:
    """Scores weighted means of the teachers' cosines on labeled dev sets.

    Args:
        dev: The dev sets.
        cosines: (T, P) cosines of T teachers for the P pairs of all sets, in their order.
        spreads: The T standard deviations of each teacher's cosines of different sentences.
    """

    def __init__(self, dev: LabelledDev, cosines: NDArray[np.float32], spreads: Sequence[float]) -> None:
        self._dev = dev
        self._cosines = cosines
        self.spreads = spreads

    @classmethod
    def of(
        cls,
        dev: LabelledDev,
        teachers: Mapping[int, TeacherSection],
        cache: ArtifactStore,
        reporter: Reporter,
    ) -> DevEnsemble:
        """Embed the dev sets' sentences by every teacher, or take their vectors from the cache."""
        texts = list(dict.fromkeys([*dev.first, *dev.second]))
        index = {text: row for row, text in enumerate(texts)}
        first, second = ([index[text] for text in side] for side in (dev.first, dev.second))
        sample = np.random.default_rng(0).permutation(len(texts))[:SAMPLE]
        cosines, spreads = [], []
        for number, teacher in teachers.items():
            progress = partial(reporter.advance, f"teacher {number}", total=len(texts), unit="sentences")
            vectors = embed_texts(teacher, texts, cache, progress)
            cosines.append(np.einsum("nd,nd->n", vectors[first], vectors[second]))
            spreads.append(measure_statistics(vectors[sample]).spread)
            reporter.emit(StageProgress(f"teacher {number}", len(texts), len(texts), "sentences", finished=True))
        return cls(dev, np.stack(cosines), spreads)

    def score(self, weights: Sequence[float] | NDArray[np.float64]) -> float:
        """Return the dev score of the mean of the teachers' cosines with T weights."""
        return self._dev.score_similarities(np.asarray(weights) @ self._cosines)

    def losses_without(self, weights: Sequence[float]) -> list[float]:
        """Return by how much the dev score falls without each teacher; negative where it rises."""
        full = self.score(weights)
        return [
            full - self.score(np.where(np.arange(len(weights)) == number, 0.0, weights))
            for number in range(len(weights))
        ]

    def fit(self, weights: Sequence[float]) -> list[float]:
        """Fit the weights to the dev score by coordinate ascent.

        Returns:
            T weights with mean 1.
        """
        fitted, best = np.asarray(weights, dtype=np.float64), self.score(weights)
        for _ in range(_ROUNDS):
            before = best
            for number in range(len(fitted)):
                tried = np.repeat(fitted[None, :], len(_FACTORS), axis=0)
                tried[:, number] *= _FACTORS
                scores = [self.score(row) for row in tried]
                if max(scores) > best:
                    fitted, best = tried[int(np.argmax(scores))], max(scores)
            if best - before < _LEAST_GAIN:
                break
        return _with_mean_one(fitted)


def _with_mean_one(weights: Sequence[float] | NDArray[np.float64]) -> list[float]:
    return [float(weight) for weight in np.asarray(weights) / np.mean(weights)]
