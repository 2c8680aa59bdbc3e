"""Candidates of queries: for each query its nearest documents by the teachers' tables together, and some at random.

    <cache>/candidates/<key>/0-8192/    of queries 0 to 8,191, in the order of the corpus:
                                        ids.npy          (n, k) int64 row ids of documents, the nearest first, then random ones
                                        scores.npy       (n, k) float32 weighted mean of the teachers' cosines
                                        candidates.json  sizes and checksums of both

The search is exact. A block is complete or absent, so that what a killed run has found is not searched for again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.recipe import CandidatesSection
from distcse.storage import ArtifactStore, content_key
from distcse.teachers.targets import TargetSpec
from distcse.text import Corpus
from distcse.text.ragged import fetch_label, find_cached, write_cache_folder

_FORMAT = 1
_LABEL, _IDS, _SCORES = "candidates.json", "ids.npy", "scores.npy"
BLOCK_QUERIES = 8192
BLOCK_DOCUMENTS = 16_384
"""Documents that a block of queries is compared with at once: their products take 512 MB."""


@dataclass(frozen=True)
class CandidateSearch:
    """What determines the candidates of a corpus's queries, and where they are stored."""

    prepared: ArtifactStore
    """Folder of the corpus."""
    teachers: TargetSpec
    """Their tables and weights, without a projection."""
    section: CandidatesSection
    cache: ArtifactStore

    def __reduce__(self) -> tuple[Any, ...]:
        return CandidateSearch, (self.prepared, self.teachers, self.section, self.cache)

    @cached_property
    def store(self) -> ArtifactStore:
        """The folder of the blocks. Who lets them be written holds its lease."""
        identity = [_FORMAT, self.teachers.key, self.section.per_query, self.section.random]
        return self.cache / "candidates" / content_key(identity)

    @cached_property
    def queries(self) -> NDArray[np.int64]:
        """Row ids of the queries."""
        return Corpus.open(self.prepared).rows_of_role("query")

    @cached_property
    def documents(self) -> NDArray[np.int64]:
        """Row ids of the documents."""
        return Corpus.open(self.prepared).rows_of_role("document")

    @property
    def blocks(self) -> list[range]:
        """The numbers of each block's queries."""
        return _blocks(len(self.queries))

    @cached_property
    def _vectors(self) -> Callable[[NDArray[np.int64]], NDArray[np.float32]]:
        """Maps row ids to vectors whose inner products are the teachers' weighted mean cosines."""
        return self.teachers.open().vectors

    def missing_blocks(self) -> list[int]:
        """Return the numbers of the blocks that are not stored, or damaged."""
        return [
            number
            for number, block in enumerate(self.blocks)
            if find_cached(_folder(self.store, block), _LABEL) is None
        ]

    def write_block(self, number: int, on_progress: Callable[[int], None] | None = None) -> None:
        """Find and store the candidates of a block's queries.

        Args:
            number: The block's number.
            on_progress: Called with the number of documents that its queries were compared with so far.

        Raises:
            EmbeddingTableError: A shard of a table is missing or damaged.
            CorpusCacheError: The cache cannot be written.
        """
        block = self.blocks[number]
        queries = self._vectors(self.queries[block.start : block.stop])
        places, scores = self._nearest(queries, on_progress)
        random = self._random(places, np.random.Generator(np.random.PCG64([number])))
        drawn = self._vectors(self.documents[random.ravel()])
        of_random = np.einsum("nd,nkd->nk", queries, drawn.reshape(*random.shape, -1))
        with write_cache_folder(_folder(self.store, block), _LABEL) as (temporary, _):
            np.save(temporary / _IDS, self.documents[np.concatenate([places, random], axis=1)])
            np.save(temporary / _SCORES, np.concatenate([scores, of_random], axis=1, dtype=np.float32))

    def _nearest(
        self, queries: NDArray[np.float32], on_progress: Callable[[int], None] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the (n, k) places and scores of the nearest documents of (n, D) queries, the nearest first."""
        count = min(self.section.per_query - self.section.random, len(self.documents))
        places = np.empty((len(queries), 0), dtype=np.int64)
        scores = np.empty((len(queries), 0), dtype=np.float32)
        for begin in range(0, len(self.documents), BLOCK_DOCUMENTS):
            part = self.documents[begin : begin + BLOCK_DOCUMENTS]
            products = queries @ self._vectors(part).T
            kept = np.argpartition(products, -min(count, len(part)), axis=1)[:, -count:]
            places = np.concatenate([places, begin + kept], axis=1)
            scores = np.concatenate([scores, np.take_along_axis(products, kept, axis=1)], axis=1)
            # Ties are in the order of the documents.
            best = np.lexsort((places, -scores), axis=1)[:, :count]
            places, scores = np.take_along_axis(places, best, axis=1), np.take_along_axis(scores, best, axis=1)
            if on_progress is not None:
                on_progress(begin + len(part))
        return places, scores

    def _random(self, near: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
        """Draw (n, k) places of documents that are not among the (n, m) near ones, as far as there are others."""
        count = len(self.documents)
        drawn = random.integers(0, count, size=(len(near), self.section.per_query - near.shape[1]))
        for _ in range(8):
            is_taken = (drawn[:, :, None] == near[:, None, :]).any(axis=2)
            if not is_taken.any():
                break
            drawn[is_taken] = random.integers(0, count, size=int(is_taken.sum()))
        return drawn


class Candidates:
    """The candidates of a corpus's n queries.

    Args:
        store: Folder of all blocks.
        queries: Number of queries n.

    Raises:
        CorpusCacheError: A block is incomplete or damaged.
    """

    def __init__(self, store: ArtifactStore, queries: int) -> None:
        folders = [_folder(store, block) for block in _blocks(queries)]
        for folder in folders:
            fetch_label(folder, _LABEL, "candidates")
        self.ids: NDArray[np.int64] = np.concatenate([np.load(folder.path / _IDS) for folder in folders])
        """(n, k) row ids of documents."""
        self.scores: NDArray[np.float32] = np.concatenate([np.load(folder.path / _SCORES) for folder in folders])
        """(n, k) the teachers' scores."""


def _blocks(queries: int) -> list[range]:
    return [range(first, min(first + BLOCK_QUERIES, queries)) for first in range(0, queries, BLOCK_QUERIES)]


def _folder(store: ArtifactStore, block: range) -> ArtifactStore:
    return store / f"{block.start}-{block.stop}"
