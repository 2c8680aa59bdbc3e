"""Models to evaluate: a bi-encoder that outputs vectors, or a cross-encoder that scores a pair of sentences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from distcse.errors import ModelOutputError
from distcse.events import Reporter
from distcse.models import Encoder
from distcse.rank_space import RankSpaceEncoder, index_pairs
from distcse.recipe import Role
from distcse.text.corpus import of_role

Pairs = tuple[Sequence[str], Sequence[str]]
Progress = Callable[[int, int], None]
"""Called with the number of encoded texts or scored pairs, and the total."""


def reporting(reporter: Reporter, name: str, unit: str = "texts") -> Progress:
    """Return a model's `Progress`: it reports to a reporter, whose stop request ends the model's work between two batches."""
    return lambda done, total: reporter.advance(name, done, total, unit)


TEXTS_PER_BLOCK = 1 << 18
"""Texts that are encoded in one call, whose vectors are kept together: 400 MB in 384 dimensions."""
PAIRS_PER_BLOCK = 8192
"""Pairs whose cosines are computed together: their vectors are copied in float64."""


class PairModel(Protocol):
    """A model that computes the similarity of two sentences."""

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """Compute the (n,) similarities of n pairs; higher is more similar."""
        ...


class VectorModel:
    """A bi-encoder that encodes each distinct sentence once, for all suites.

    Args:
        encode: Maps n texts to (n, d) vectors, in the order of the texts; `Encoder.encode` or a function like it.
        roles: The roles that it reads in another way than plain texts: `encode` gets each with `role=`. Default: none.
        device: Where its vectors are compared. Default: the CPU.
    """

    def __init__(
        self, encode: Callable[..., NDArray[np.floating]], roles: Collection[Role] = (), device: str = "cpu"
    ) -> None:
        self.device = device
        self.seconds = 0.0
        """Time spent in `encode`."""
        self._encode = encode
        self._roles = frozenset(roles)
        self._rows: dict[Role, dict[str, int]] = {}
        self._blocks: list[NDArray[np.float32]] = []
        self._starts: list[int] = []

    @classmethod
    def of(cls, encoder: Encoder, precision: str = "fp32", on_progress: Progress | None = None) -> VectorModel:
        """Wrap an encoder; its folder decides whether vectors are normalized."""
        return cls(_make_encode(encoder, precision, on_progress), encoder.roles_apart, str(encoder.device))

    def prepare(self, texts: Iterable[str], role: Role = "text") -> None:
        """Encode the texts of a role that are not cached yet, in large calls, so that batches are sorted by length over many."""
        role = self._read_as(role)
        rows = self._rows.setdefault(role, {})
        every = [text for text in dict.fromkeys(texts) if text not in rows]
        for begin in range(0, len(every), TEXTS_PER_BLOCK):
            new = every[begin : begin + TEXTS_PER_BLOCK]
            started_at = perf_counter()
            vectors = np.asarray(of_role(self._encode, role)(new), dtype=np.float32)
            self.seconds += perf_counter() - started_at
            parts = (vectors[at : at + PAIRS_PER_BLOCK] for at in range(0, len(new), PAIRS_PER_BLOCK))
            _require_finite(sum(int((~np.isfinite(part)).any(axis=1).sum()) for part in parts), len(new), "texts")
            self.remember(new, vectors, role)

    def remember(self, texts: Sequence[str], vectors: NDArray[np.float32], role: Role = "text") -> None:
        """Take the (n, d) vectors of n texts of a role as computed."""
        start = self._starts[-1] + len(self._blocks[-1]) if self._blocks else 0
        rows = self._rows.setdefault(self._read_as(role), {})
        rows.update({text: start + offset for offset, text in enumerate(texts)})
        self._blocks.append(vectors)
        self._starts.append(start)

    def _read_as(self, role: Role) -> Role:
        return role if role in self._roles else "text"

    def compute(self, texts: Sequence[str]) -> None:
        """Encode n texts, known or not, and keep nothing: a pass to be timed."""
        self._encode(texts)

    def vectors(self, texts: Sequence[str], role: Role = "text") -> NDArray[np.float32]:
        """Return the (n, d) vectors of n texts of a role."""
        self.prepare(texts, role)
        row_of = self._rows[self._read_as(role)]
        rows = np.array([row_of[text] for text in texts])
        blocks = np.searchsorted(self._starts, rows, side="right") - 1
        vectors = np.empty((len(rows), self._blocks[0].shape[1]), dtype=np.float32)
        for block in np.unique(blocks):
            chosen = blocks == block
            vectors[chosen] = self._blocks[block][rows[chosen] - self._starts[block]]
        return vectors

    def unit_vectors(self, texts: Sequence[str], role: Role = "text") -> NDArray[np.float32]:
        """Return the (n, d) vectors of n texts of a role, normalized to length 1; a zero vector stays zero."""
        vectors = self.vectors(texts, role)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.where(lengths > 0, lengths, 1.0), dtype=np.float32)

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """Compute the (n,) cosines of n pairs; 0 if a vector is zero, like SentEval's `nan_to_num`.

        Cosines are computed in float64 and rounded to float32, so that those of equal sentences are exactly 1 and tie. Without
        rounding, the correlation on STS12, which has 79 such pairs, differs by 3e-5 between libraries.
        """
        self.prepare([*first, *second])
        cosines = np.empty(len(first))
        for begin in range(0, len(first), PAIRS_PER_BLOCK):
            rows = slice(begin, begin + PAIRS_PER_BLOCK)
            ours, theirs = (self.vectors(texts[rows]).astype(np.float64) for texts in (first, second))
            lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
            products = np.einsum("nd,nd->n", ours, theirs)
            cosines[rows] = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
        return cosines.astype(np.float32).astype(np.float64)


def _make_encode(encoder: Encoder, precision: str, on_progress: Progress | None) -> Callable[..., NDArray[np.float32]]:
    """Return an encoder's `encode` as a function of texts and their role, for a precision."""

    def encode(texts: Sequence[str], role: Role = "text") -> NDArray[np.float32]:
        progress = None if on_progress is None else lambda done: on_progress(done, len(texts))
        return encoder.encode(texts, role=role, precision=precision, on_progress=progress)

    return encode


class RankSpaceModel(VectorModel):
    """A bi-encoder whose pairs are scored by cosine and by rank (RankEncoder, Eq. 7)."""

    def __init__(self, ranker: RankSpaceEncoder, precision: str = "fp32", on_progress: Progress | None = None) -> None:
        super().__init__(_make_encode(ranker.encoder, precision, on_progress), device=str(ranker.encoder.device))
        self._ranker = ranker

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """Compute the (n,) scores of n pairs; each distinct sentence is ranked once."""
        unique, left, right = index_pairs(first, second)
        vectors = self.unit_vectors(unique)
        started_at = perf_counter()
        scores = self._ranker.scores(vectors, left, right)
        self.seconds += perf_counter() - started_at
        return scores


class Scorer(Protocol):
    """Interface of a cross-encoder, as its evaluation needs it."""

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        precision: str = ...,
        on_progress: Callable[[int], None] | None = ...,
    ) -> NDArray[np.float64]:
        """Return the (n,) scores of n pairs."""
        ...


class PairScores:
    """A cross-encoder that scores each distinct pair once, for all suites."""

    def __init__(self, encoder: Scorer, on_progress: Progress | None = None, precision: str = "fp32") -> None:
        self.seconds = 0.0
        """Time spent scoring pairs."""
        self._encoder = encoder
        self._on_progress = on_progress
        self._precision = precision
        self._known: dict[tuple[str, str], float] = {}

    def prepare(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Score the pairs that are not cached yet, in one call."""
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
        on_progress = self._on_progress
        started_at = perf_counter()
        progress = None if on_progress is None else lambda done: on_progress(done, len(new))
        scores = self._encoder.score(new, precision=self._precision, on_progress=progress)
        self.seconds += perf_counter() - started_at
        _require_finite(int((~np.isfinite(scores)).sum()), len(new), "pairs")
        self._known.update(zip(new, scores.tolist(), strict=True))

    def compute(self, texts: Sequence[str]) -> None:
        """Score n pairs of each text and the next one, known or not, and keep nothing: a pass to be timed."""
        following = [*texts[1:], *texts[:1]]
        self._encoder.score(list(zip(texts, following, strict=True)), precision=self._precision)

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """Return the (n,) probabilities of n pairs."""
        pairs = list(zip(first, second, strict=True))
        self.prepare(pairs)
        return np.array([self._known[pair] for pair in pairs])


def _require_finite(not_finite: int, total: int, unit: str) -> None:
    if not_finite:
        raise ModelOutputError(
            f"the model's output is NaN or infinite for {not_finite:,} of {total:,} {unit}: it diverged in training, or its "
            "precision is too low; try precision fp32"
        )


class Ensemble:
    """Mean of several models' similarities (Trans-Encoder, Table 5): of cosines, or of probabilities."""

    def __init__(self, members: Sequence[PairModel]) -> None:
        self.seconds = 0.0
        """Always 0: the members count their own time and cache their outputs."""
        self._members = members

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """Compute the (n,) means over the members."""
        return np.asarray(np.mean([member.similarities(first, second) for member in self._members], axis=0))


@dataclass(frozen=True)
class RecordedScores:
    """A model's similarities of the pairs that were asked of it; picklable, for an ensemble in another process."""

    known: dict[tuple[str, str], float] = field(default_factory=dict)
    """Similarities by pair."""

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """Return the (n,) recorded similarities of n pairs."""
        return np.array([self.known[pair] for pair in zip(first, second, strict=True)])

    def recording(self, model: PairModel) -> PairModel:
        """Return a view of a model whose similarities are recorded here."""
        return _Recorder(model, self.known)


class _Recorder:
    """Computes a model's similarities, and adds them to a table."""

    def __init__(self, model: PairModel, known: dict[tuple[str, str], float]) -> None:
        self._model, self._known = model, known

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """Compute the (n,) similarities of n pairs."""
        computed = self._model.similarities(first, second)
        self._known.update(zip(zip(first, second, strict=True), computed.tolist(), strict=True))
        return computed


Model = VectorModel | PairScores | Ensemble
