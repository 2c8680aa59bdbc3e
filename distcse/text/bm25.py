"""BM25 index of texts: finds those that share words with a query, by bm25s (Lù 2024)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.devices import host
from distcse.errors import CorpusTooSmallError, MissingDependencyError
from distcse.events import Reporter

QUERIES_PER_BATCH = 500
"""Queries between two reports of progress, each of which takes about 0.1 s in a million texts."""


def require_bm25(key: str, alternative: str) -> Any:
    """Import bm25s, or raise a `MissingDependencyError` that names the recipe's key and what to write instead."""
    try:
        package = import_module("bm25s")
    except ImportError:
        raise MissingDependencyError(
            f"{key} needs bm25s; {host.pip_install('mining')}, or write {alternative}"
        ) from None
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return package


class BM25Index:
    """BM25 index of n texts, in lower case and without English stop words (Robertson et al. 1995, as Lucene computes it).

    Args:
        bm25s: The package.
        index: Its index.
    """

    def __init__(self, bm25s: Any, index: Any) -> None:
        self._bm25s, self._index = bm25s, index

    @classmethod
    def build(cls, bm25s: Any, texts: Sequence[str], reporter: Reporter, stage: str) -> BM25Index:
        """Index n texts in memory, as a part of a stage.

        Raises:
            CorpusTooSmallError: No text has a word.
        """
        reporter.advance(stage, 0, len(texts), "sentences read by BM25")
        tokens = bm25s.tokenize(reporter.follow(texts, stage), stopwords="en", show_progress=False)
        reporter.advance(stage, len(texts), len(texts), "sentences read by BM25")
        if not tokens.vocab:
            raise CorpusTooSmallError(
                f"BM25 finds no word of two or more letters, stop words apart, in {len(texts):,} texts; find neighbors without it"
            )
        index = bm25s.BM25()
        index.index(tokens._replace(ids=_Followed(tokens.ids, reporter, stage)), show_progress=False)
        return cls(bm25s, index)

    def save(self, folder: Path) -> None:
        """Write the index into a folder."""
        self._index.save(folder, show_progress=False)

    @classmethod
    def load(cls, bm25s: Any, folder: Path) -> BM25Index:
        """Memory-map an index that `save` wrote."""
        return cls(bm25s, bm25s.BM25.load(folder, mmap=True, show_progress=False))

    def nearest(
        self, queries: Sequence[str], count: int, on_progress: Callable[[int], None] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Find the texts of the highest scores.

        Args:
            queries: m texts.
            count: k, at most n.
            on_progress: Called with the number of queries whose texts are found.

        Returns:
            (m, k) places of texts, the highest score first, and their (m, k) scores: 0 where no word is shared.
        """
        places, scores = [np.empty((0, count), dtype=np.int64)], [np.empty((0, count), dtype=np.float32)]
        for begin in range(0, len(queries), QUERIES_PER_BATCH):
            batch = queries[begin : begin + QUERIES_PER_BATCH]
            words = self._bm25s.tokenize(list(batch), stopwords="en", return_ids=False, show_progress=False)
            found = self._index.retrieve(words, k=count, show_progress=False, n_threads=host.cpus())
            places.append(found[0].astype(np.int64))
            scores.append(found[1])
            if on_progress is not None:
                on_progress(begin + len(batch))
        return np.concatenate(places), np.concatenate(scores)


class _Followed(list[list[int]]):
    """The texts' token ids; iteration over them ends at a stop request."""

    def __init__(self, ids: list[list[int]], reporter: Reporter, stage: str) -> None:
        super().__init__(ids)
        self._reporter, self._stage = reporter, stage

    def __iter__(self) -> Iterator[list[int]]:
        return self._reporter.follow(super().__iter__(), self._stage)
