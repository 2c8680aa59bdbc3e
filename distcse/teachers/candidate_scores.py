"""Scores of candidates by teachers that read pairs: one pass of each, averaged with the cosines of the teachers with tables.

    <cache>/candidates/<key>/scores-<key>/0-128/    of queries 0 to 127, in the order of the corpus:
                                                    scores.npy    (n, k) float32 scores of (query, candidate)
                                                    scores.json   size and checksum

A shard is complete or absent, so that a killed pass scores only what it had in work again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distcse.errors import RefusedTextError
from distcse.recipe import TeacherSection
from distcse.storage import ArtifactStore, content_key
from distcse.teachers.candidates import Candidates, CandidateSearch
from distcse.teachers.kinds import kind_of
from distcse.teachers.teacher import Pairs, not_finite
from distcse.text import Corpus
from distcse.text.ragged import fetch_label, find_cached, write_cache_folder

_FORMAT = 1
_LABEL, _SCORES = "scores.json", "scores.npy"
SHARD_PAIRS = 4096
"""Most pairs of a shard, unless a query has more candidates."""


@dataclass(frozen=True)
class CandidateScoring:
    """One teacher's scores of all candidates, and where they are stored."""

    search: CandidateSearch
    teacher: TeacherSection
    """One that reads pairs, such as a cross-encoder."""

    @cached_property
    def store(self) -> ArtifactStore:
        """The folder of the shards. Who lets them be written holds its lease."""
        kind = kind_of(self.teacher)
        identity = [_FORMAT, kind.source_fingerprint(), self.teacher.longest, kind.precision]
        return self.search.store / f"scores-{content_key(identity)}"

    @cached_property
    def shards(self) -> list[range]:
        """The numbers of each shard's queries, which are of one block."""
        size = max(1, SHARD_PAIRS // self.search.section.per_query)
        return [
            range(first, min(first + size, block.stop))
            for block in self.search.blocks
            for first in range(block.start, block.stop, size)
        ]

    def num_pairs(self, numbers: Sequence[int]) -> int:
        """Return the number of pairs of some shards."""
        return sum(len(self.shards[number]) for number in numbers) * self.search.section.per_query

    def missing_shards(self) -> list[int]:
        """Return the numbers of the shards that are not stored, or damaged."""
        return [number for number, shard in enumerate(self.shards) if find_cached(self._folder(shard), _LABEL) is None]

    def write_shards(
        self,
        numbers: Sequence[int],
        tokens_per_batch: int | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Score the candidates of shards, and store each shard before the next.

        Args:
            numbers: The shards' numbers.
            tokens_per_batch: Maximum number of tokens in a forward pass. Default: the device's.
            on_progress: Called with the number of pairs scored so far.

        Raises:
            TeacherError: The teacher cannot be asked, refuses a text, or a score is not finite.
            CorpusCacheError: The cache cannot be written.
        """
        kind, corpus = kind_of(self.teacher), Corpus.open(self.search.prepared)
        scored = kind.open_scorer().score_each(
            (self._pairs(corpus, self.shards[number]) for number in numbers),
            batch_tokens=tokens_per_batch,
            precision=kind.precision,
            on_progress=on_progress,
        )
        for shard in (self.shards[number] for number in numbers):
            try:
                scores = next(scored)
            except RefusedTextError as error:
                if error.index is not None:
                    query, place = divmod(error.index, self.search.section.per_query)
                    rows = self.search.queries[shard.start + query], self._ids(shard)[query, place]
                    error.place = f"corpus rows {rows[0]} and {rows[1]}"
                raise
            if len(bad := np.flatnonzero(~np.isfinite(scores))):
                raise not_finite(*self._pairs(corpus, shard)[bad[0]])
            with write_cache_folder(self._folder(shard), _LABEL) as (temporary, _):
                np.save(temporary / _SCORES, scores.astype(np.float32).reshape(len(shard), -1))

    def scores(self) -> NDArray[np.float32]:
        """Return the (n, k) scores of the candidates of all n queries.

        Raises:
            CorpusCacheError: A shard is incomplete or damaged.
        """
        folders = [self._folder(shard) for shard in self.shards]
        for folder in folders:
            fetch_label(folder, _LABEL, "scores of candidates")
        return np.concatenate([np.load(folder.path / _SCORES) for folder in folders])

    def _folder(self, shard: range) -> ArtifactStore:
        return self.store / f"{shard.start}-{shard.stop}"

    def _ids(self, shard: range) -> NDArray[np.int64]:
        """Return the (n, k) row ids of the candidates of a shard's queries."""
        block = next(block for block in self.search.blocks if shard.start in block)
        return self.search.read_block(block).ids[shard.start - block.start : shard.stop - block.start]

    def _pairs(self, corpus: Corpus, shard: range) -> Pairs:
        """Return the texts of a shard's n·k pairs: each query with its candidates, then the next query."""
        ids = self._ids(shard)
        queries = corpus.texts(np.repeat(self.search.queries[shard.start : shard.stop], ids.shape[1]))
        return list(zip(queries, corpus.texts(ids.ravel()), strict=True))


@dataclass(frozen=True)
class ScoredCandidates:
    """Where candidates and all teachers' scores are stored; small enough to send to a worker."""

    search: CandidateSearch
    scorings: Sequence[CandidateScoring] = ()

    def open(self) -> Candidates:
        """Read the candidates, with the mean of all teachers' scores, weighted by `alpha`.

        Raises:
            CorpusCacheError: A block or shard is incomplete or damaged.
        """
        found = self.search.open()
        weights = [sum(self.search.teachers.alphas), *(scoring.teacher.alpha for scoring in self.scorings)]
        total = np.zeros(found.scores.shape)
        for weight, scores in zip(
            weights, [found.scores, *(scoring.scores() for scoring in self.scorings)], strict=True
        ):
            total += weight / sum(weights) * scores
        return Candidates(found.ids, total.astype(np.float32))
