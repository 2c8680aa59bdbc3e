"""Candidates of queries: for each query its nearest documents by the teachers' tables together or by BM25, and some at random.

    <cache>/candidates/<key>/0-8192/    of queries 0 to 8,191, in the order of the corpus:
                                        ids.npy          (n, k) int64 row ids of documents, the nearest first, then random ones
                                        scores.npy       (n, k) float32 weighted mean of the teachers' cosines
                                        candidates.json  sizes and checksums of both
    <cache>/bm25/<key>/                 the index of the documents' words
    <cache>/vectors/<key>/              the inverted file of their vectors

By the teachers' tables, the search is exact for up to `candidates.exact_up_to` documents, and in an inverted file for more. A
block is complete or absent, so that what a killed run has found is not searched for again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.devices.device import default_device
from distcse.events import Reporter
from distcse.recipe import CandidatesSection
from distcse.storage import ArtifactStore, content_key
from distcse.teachers.table import BYTES_PER_NUMBER
from distcse.teachers.targets import TargetSpec
from distcse.text import Corpus
from distcse.text.bm25 import BM25Index, require_bm25
from distcse.text.ragged import fetch_label, find_cached, write_cache_folder
from distcse.text.vector_index import ROWS_PER_LIST, VectorIndex, number_of_lists, require_faiss

_FORMAT = 1
_LABEL, _IDS, _SCORES = "candidates.json", "ids.npy", "scores.npy"
_INDEX, _VECTORS = "index.json", "vectors.faiss"
CANDIDATES = "candidates"
_WORD_BYTES = 1000
"""Estimate of a text with its entries in BM25's index."""
BLOCK_QUERIES = 8192
BLOCK_DOCUMENTS = 16_384
"""Documents that a block of queries is compared with at once: their products take 512 MB."""
_SCORED_QUERIES = 512
"""Queries whose candidates' vectors are in memory at once."""


class Candidates(NamedTuple):
    """Candidates of n queries."""

    ids: NDArray[np.int64]
    """(n, k) row ids of documents."""
    scores: NDArray[np.float32]
    """(n, k) the teachers' scores."""


class MissingIndex(NamedTuple):
    """An index of the documents that a search needs and that is not stored."""

    name: str
    write: Callable[[Reporter], None]
    memory: float
    """Estimated bytes of a process that makes it, next to its libraries."""


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
        if self.section.by != "teachers":  # there may be no table, whose key holds the corpus
            identity += [self.section.by, self._corpus.fingerprint]
        if self.uses_lists:
            identity.append("lists")
        return self.cache / "candidates" / content_key(identity)

    @property
    def uses_lists(self) -> bool:
        """Whether the search by the teachers' tables is in an inverted file."""
        return self.section.searches_lists(len(self.documents))

    @property
    def _words(self) -> ArtifactStore:
        """The folder of the documents' BM25 index, which searches with other teachers share."""
        return self.cache / "bm25" / content_key([_FORMAT, self._corpus.fingerprint])

    @property
    def _lists(self) -> ArtifactStore:
        """The folder of the inverted file, which other searches with these teachers share."""
        return self.cache / "vectors" / content_key([_FORMAT, self.teachers.key])

    @cached_property
    def _corpus(self) -> Corpus:
        return Corpus.open(self.prepared)

    @cached_property
    def queries(self) -> NDArray[np.int64]:
        """Row ids of the queries."""
        return self._corpus.rows_of_role("query")

    @cached_property
    def documents(self) -> NDArray[np.int64]:
        """Row ids of the documents."""
        return self._corpus.rows_of_role("document")

    @property
    def blocks(self) -> list[range]:
        """The numbers of each block's queries."""
        starts = range(0, len(self.queries), BLOCK_QUERIES)
        return [range(first, min(first + BLOCK_QUERIES, len(self.queries))) for first in starts]

    @cached_property
    def _vectors(self) -> Callable[[NDArray[np.int64]], NDArray[np.float32]]:
        """Maps row ids to vectors whose inner products are the teachers' weighted mean cosines: 0 without any table."""
        if not self.teachers.tables:
            return lambda rows: np.empty((len(rows), 0), dtype=np.float32)
        return self.teachers.open().vectors

    def missing_blocks(self) -> list[int]:
        """Return the numbers of the blocks that are not stored, or damaged."""
        return [number for number, block in enumerate(self.blocks) if find_cached(self._folder(block), _LABEL) is None]

    def missing_indexes(self) -> list[MissingIndex]:
        """Return the indexes that the search needs and that are not stored, or damaged."""
        missing, count = [], len(self.documents)
        if self.section.by != "teachers" and find_cached(self._words, _INDEX) is None:
            missing.append(MissingIndex("BM25 index", self._write_words, _WORD_BYTES * count))
        if self.uses_lists and find_cached(self._lists, _INDEX) is None:
            width = sum(table.dimension for table in self.teachers.tables)
            # Lists grow by doubling; k-means reads its sample in fp32.
            memory = 2.0 * BYTES_PER_NUMBER * width * count + 4.0 * width * ROWS_PER_LIST * number_of_lists(count)
            missing.append(MissingIndex("inverted file", self._write_lists, memory))
        return missing

    def _write_words(self, reporter: Reporter) -> None:
        index = BM25Index.build(import_bm25s(), self._corpus.texts(self.documents), reporter, CANDIDATES)
        with write_cache_folder(self._words, _INDEX) as (temporary, _):
            index.save(temporary)

    def _write_lists(self, reporter: Reporter) -> None:
        count = len(self.documents)
        index = VectorIndex.inverted_file(
            import_faiss(),
            count,
            lambda part: self._vectors(self.documents[part]),
            lambda done: reporter.advance(CANDIDATES, done, count, "documents indexed"),
            half=True,
        )
        with write_cache_folder(self._lists, _INDEX) as (temporary, _):
            index.save(temporary / _VECTORS)

    def write_block(self, number: int, reporter: Reporter) -> None:
        """Find and store the candidates of a block's queries.

        Args:
            number: The block's number.
            reporter: Receives the progress; a requested stop ends the search.

        Raises:
            EmbeddingTableError: A shard of a table is missing or damaged.
            CorpusCacheError: The cache cannot be written.
        """
        block = self.blocks[number]
        rows = self.queries[block.start : block.stop]
        vectors = self._vectors(rows)
        near = self._found(rows, vectors, reporter)
        more = np.full((len(rows), self.section.per_query - near.shape[1]), -1)
        places = self._filled(np.concatenate([near, more], axis=1), np.random.Generator(np.random.PCG64([number])))
        with write_cache_folder(self._folder(block), _LABEL) as (temporary, _):
            np.save(temporary / _IDS, self.documents[places])
            np.save(temporary / _SCORES, self._cosines(vectors, places))

    def read_block(self, block: range) -> Candidates:
        """Return a block's candidates, with the weighted means of the teachers' cosines.

        Raises:
            CorpusCacheError: The block is incomplete or damaged.
        """
        folder = self._folder(block)
        fetch_label(folder, _LABEL, CANDIDATES)
        return Candidates(np.load(folder.path / _IDS, mmap_mode="r"), np.load(folder.path / _SCORES))

    def open(self) -> Candidates:
        """Return all queries' candidates, as `read_block` does."""
        blocks = list(map(self.read_block, self.blocks))
        return Candidates(
            np.concatenate([block.ids for block in blocks]), np.concatenate([block.scores for block in blocks])
        )

    def _folder(self, block: range) -> ArtifactStore:
        return self.store / f"{block.start}-{block.stop}"

    def _found(self, rows: NDArray[np.int64], vectors: NDArray[np.float32], reporter: Reporter) -> NDArray[np.int64]:
        """Return the (n, k) places of the documents that are found for n queries; -1 where there are fewer."""
        count = min(self.section.per_query - self.section.random, len(self.documents))
        if self.section.by == "bm25":
            return self._sharing_words(rows, count, reporter)
        near = self._nearest(vectors, count, reporter)
        return near if self.section.by == "teachers" else half_each(near, self._sharing_words(rows, count, reporter))

    def _sharing_words(self, rows: NDArray[np.int64], count: int, reporter: Reporter) -> NDArray[np.int64]:
        """Return the (n, k) places of the documents of the highest BM25 scores; -1 where no word is shared."""
        fetch_label(self._words, _INDEX, "BM25 index")
        index = BM25Index.load(import_bm25s(), self._words.path)
        places, scores = index.nearest(
            self._corpus.texts(rows),
            count,
            lambda done: reporter.advance(CANDIDATES, done, len(rows), "BM25 queries"),
        )
        return np.where(scores > 0, places, -1)

    def _nearest(self, queries: NDArray[np.float32], count: int, reporter: Reporter) -> NDArray[np.int64]:
        """Return the (n, k) places of the nearest documents of (n, D) queries, the nearest first; -1 where fewer are found."""
        if self.uses_lists:
            fetch_label(self._lists, _INDEX, "inverted file")
            index, total = VectorIndex.load(import_faiss(), self._lists.path / _VECTORS), len(queries)
            report = partial(reporter.advance, CANDIDATES, total=total, unit="queries compared")
            return index.nearest(queries, count, report)[1]
        places = np.empty((len(queries), 0), dtype=np.int64)
        scores = np.empty((len(queries), 0), dtype=np.float32)
        device = default_device()
        sought = torch.from_numpy(queries).to(device)
        for begin in range(0, len(self.documents), BLOCK_DOCUMENTS):
            part = self.documents[begin : begin + BLOCK_DOCUMENTS]
            products = sought @ torch.from_numpy(self._vectors(part)).to(device).T
            # A tenth of the time of numpy's argpartition, which takes several times as long as the products.
            kept = products.topk(min(count, len(part)), dim=1, sorted=False)
            places = np.concatenate([places, begin + kept.indices.cpu().numpy()], axis=1)
            scores = np.concatenate([scores, kept.values.cpu().numpy()], axis=1)
            # Ties are in the order of the documents.
            best = np.lexsort((places, -scores), axis=1)[:, :count]
            places, scores = np.take_along_axis(places, best, axis=1), np.take_along_axis(scores, best, axis=1)
            reporter.advance(CANDIDATES, begin + len(part), None, "documents compared")
        return places

    def _filled(self, places: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
        """Draw documents for the (n, k) places that are -1, each another one than a query has, as far as there are others."""
        count, is_open = len(self.documents), places < 0
        firsts = np.arange(len(places))[:, None] * count  # a query's place as one number: firsts + place
        taken, firsts_of_open = (firsts + places)[~is_open], np.broadcast_to(firsts, places.shape)[is_open]
        drawn = random.integers(0, count, size=int(is_open.sum()))
        for _ in range(8):
            wanted, is_first = firsts_of_open + drawn, np.zeros(len(drawn), dtype=bool)
            is_first[np.unique(wanted, return_index=True)[1]] = True
            is_taken = np.isin(wanted, taken) | ~is_first
            if not is_taken.any():
                break
            drawn[is_taken] = random.integers(0, count, size=int(is_taken.sum()))
        filled = places.copy()
        filled[is_open] = drawn
        return filled

    def _cosines(self, queries: NDArray[np.float32], places: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the (n, k) weighted mean cosines of (n, D) queries and the documents at (n, k) places."""
        parts = [np.empty((0, places.shape[1]), dtype=np.float32)]
        for begin in range(0, len(places), _SCORED_QUERIES):
            part = slice(begin, begin + _SCORED_QUERIES)
            documents = self._vectors(self.documents[places[part].ravel()]).reshape(*places[part].shape, -1)
            parts.append(np.einsum("nd,nkd->nk", queries[part], documents))
        return np.concatenate(parts)


def import_faiss() -> Any:
    """Import faiss, which a search in lists needs."""
    return require_faiss("a search among more documents than candidates.exact_up_to")


def import_bm25s() -> Any:
    """Import bm25s, which a search by shared words needs."""
    return require_bm25("candidates.by", "candidates.by=teachers")


def half_each(near: NDArray[np.int64], sharing: NDArray[np.int64]) -> NDArray[np.int64]:
    """Join (n, k) places of two searches: the first half of one, as many others of the second, filled up from the first."""
    count = near.shape[1]
    half = -(-count // 2)
    joined = np.full_like(near, -1)
    for row, places in enumerate(zip(near.tolist(), sharing.tolist(), strict=True)):
        first, second = ([place for place in found if place >= 0] for found in places)
        kept = first[:half]
        others = [place for place in second if place not in kept][: count - len(kept)]
        chosen = list(dict.fromkeys([*kept, *others, *first]))[:count]
        joined[row, : len(chosen)] = chosen
    return joined
