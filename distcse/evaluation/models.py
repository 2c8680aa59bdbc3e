"""What is measured: an encoder that gives vectors, or a scorer that reads both sentences of a pair at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from distcse.errors import ModelOutputError
from distcse.models import CrossEncoder, Encoder
from distcse.rank_space import RankSpaceEncoder, numbered

Pairs = tuple[Sequence[str], Sequence[str]]
Progress = Callable[[int, int], None]
"""Told how many are done, and of how many."""


class PairModel(Protocol):
    """Anything that says how alike two sentences are."""

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """(n,) similarities of n pairs, higher is more alike."""
        ...


class VectorModel:
    """A bi-encoder: each sentence is encoded once, however many suites ask for it.

    Args:
        encode: Texts to (n, d) vectors, in the texts' order; `Encoder.encode`, or any function like it.
    """

    def __init__(self, encode: Callable[[Sequence[str]], NDArray[np.floating]]) -> None:
        self.seconds = 0.0
        """Spent encoding."""
        self._encode = encode
        self._places: dict[str, int] = {}
        self._vectors: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, encoder: Encoder, precision: str = "fp32", on_progress: Progress | None = None) -> VectorModel:
        """The vectors of an encoder, as its folder says: with or without normalisation."""
        return cls(encoding(encoder, precision, on_progress))

    def prepare(self, texts: Iterable[str]) -> None:
        """Encode those of the texts that are not known yet, in one pass: so that they are sorted by length together."""
        new = [text for text in dict.fromkeys(texts) if text not in self._places]
        if not new:
            return
        begun = perf_counter()
        vectors = np.asarray(self._encode(new), dtype=np.float32)
        self.seconds += perf_counter() - begun
        _refuse_broken(int((~np.isfinite(vectors)).any(axis=1).sum()), len(new), "texts")
        known = len(self._places)
        self._places.update({text: known + place for place, text in enumerate(new)})
        self._vectors = vectors if self._vectors is None else np.concatenate([self._vectors, vectors])

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(n, d) vectors of n texts."""
        self.prepare(texts)
        assert self._vectors is not None
        return self._vectors[[self._places[text] for text in texts]]

    def unit_vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(n, d) vectors of n texts, of length 1; a zero vector stays zero."""
        vectors = self.vectors(texts)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.where(lengths > 0, lengths, 1.0), dtype=np.float32)

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """(n,) cosines; 0 where a vector is zero, as SentEval's nan_to_num has it.

        Computed in float64 and rounded to float32: the cosines of equal sentences are 1 without the last bits' noise, and
        tie. In that noise the correlation on STS12, with 79 such pairs, moves by 3e-5 from library to library.
        """
        self.prepare([*first, *second])
        ours, theirs = (self.vectors(texts).astype(np.float64) for texts in (first, second))
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        products = np.einsum("nd,nd->n", ours, theirs)
        cosines = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
        return np.asarray(cosines.astype(np.float32), dtype=np.float64)


def encoding(
    encoder: Encoder, precision: str = "fp32", on_progress: Progress | None = None
) -> Callable[[Sequence[str]], NDArray[np.float32]]:
    """An encoder as a function of texts."""

    def encode(texts: Sequence[str]) -> NDArray[np.float32]:
        told = None if on_progress is None else lambda done: on_progress(done, len(texts))
        return encoder.encode(texts, precision=precision, on_progress=told)

    return encode


class RankSpaceModel(VectorModel):
    """A bi-encoder whose pairs are scored by cosine and by rank (RankEncoder Eq. 7); its vectors are those of the encoder."""

    def __init__(
        self, ranker: RankSpaceEncoder, encode: Callable[[Sequence[str]], NDArray[np.floating]] | None = None
    ) -> None:
        super().__init__(encode or ranker.encoder.encode)
        self._ranker = ranker

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """(n,) scores; each sentence is ranked once."""
        unique, left, right = numbered(first, second)
        vectors = self.unit_vectors(unique)
        begun = perf_counter()
        scores = self._ranker.scores(vectors, left, right)
        self.seconds += perf_counter() - begun
        return scores


class PairScores:
    """A cross-encoder: each pair is scored once, however many suites ask for it."""

    def __init__(self, encoder: CrossEncoder, on_progress: Progress | None = None, precision: str = "fp32") -> None:
        self.seconds = 0.0
        """Spent scoring."""
        self._encoder = encoder
        self._on_progress = on_progress
        self._precision = precision
        self._known: dict[tuple[str, str], float] = {}

    def prepare(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Score those of the pairs that are not known yet, in one pass."""
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
        told = self._on_progress
        begun = perf_counter()
        progress = None if told is None else lambda done: told(done, len(new))
        scores = self._encoder.score(new, precision=self._precision, on_progress=progress)
        self.seconds += perf_counter() - begun
        _refuse_broken(int((~np.isfinite(scores)).sum()), len(new), "pairs")
        self._known.update(zip(new, scores.tolist(), strict=True))

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """(n,) probabilities that a pair is alike."""
        pairs = list(zip(first, second, strict=True))
        self.prepare(pairs)
        return np.array([self._known[pair] for pair in pairs])


def _refuse_broken(broken: int, of: int, what: str) -> None:
    if broken:
        raise ModelOutputError(
            f"the model gives no numbers (NaN or infinity) for {broken:,} of {of:,} {what}; it has diverged, "
            "or its precision is too low"
        )


class Ensemble:
    """The mean of several models' predictions (Trans-Encoder, Table 5): of cosines, or of probabilities."""

    def __init__(self, members: Sequence[Model]) -> None:
        self.seconds = 0.0
        """Nothing of its own: the members are asked, and what they know they are not asked again."""
        self._members = members

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """(n,) means over the members."""
        return np.asarray(np.mean([member.similarities(first, second) for member in self._members], axis=0))


Model = VectorModel | PairScores | Ensemble
