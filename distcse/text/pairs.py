"""Sentence pairs on disk: each distinct sentence is stored once, and a pair is two row ids. Memory-mapped by every process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.errors import CorpusCacheError
from distcse.events import CHUNK
from distcse.storage import ArtifactStore, bytes_checksum, sha256
from distcse.text.corpus import Corpus, Progress, decode_rows, write_sentences
from distcse.text.ragged import RaggedRows, RaggedWriter, fetch_label, load_verified_label, write_cache_folder

_LABEL = "pairs.json"
_ROWS = "rows.npy"
_DIGEST = np.dtype([("high", np.uint64), ("low", np.uint64)])

PairRows = NDArray[np.integer]
"""(n, 2) row ids of the sentences of n pairs."""


class Pairs:
    """n different sentence pairs, memory-mapped: a process holds only what it reads.

    Args:
        store: Folder that `write` or `write_rows` wrote.
        label: Content of its label file.
    """

    def __init__(self, store: ArtifactStore, label: dict[str, Any]) -> None:
        self.store = store
        self.fingerprint: str = label["fingerprint"]
        """Checksum of the pairs and their order."""
        self.sentences = Corpus(store, label["sentences"], reused=True)
        """The distinct sentences, in the order of their first pairs."""
        self.rows: PairRows = np.asarray(np.load(store.path / _ROWS, mmap_mode="r", allow_pickle=False))
        """(n, 2) rows of each pair's sentences in `sentences`."""

    @classmethod
    def write(
        cls,
        store: ArtifactStore,
        pairs: Iterable[tuple[str, str]],
        select: Callable[[int], NDArray[np.int64]] | None = None,
        on_progress: Progress = lambda done: None,
    ) -> Pairs:
        """Store the different pairs of a stream, in its order.

        Keeps 16 bytes per sentence of the stream in memory, and sorts them; the sentences themselves are on disk.

        Args:
            store: The folder to write.
            pairs: The pairs; repeated ones are left out.
            select: Maps the number of different pairs to the rows of those to store, ascending. Default: all.
            on_progress: Called with the number of sentences read, and then with that of sentences stored.

        Raises:
            CorpusCacheError: The folder cannot be written.
        """
        with write_cache_folder(store, _LABEL, "storage.runs") as (temporary, label):
            spool = temporary / "spool"
            spool.mkdir()
            rows = _first_of_each(_spooled(spool, pairs, on_progress))
            if select is not None:
                rows = rows[select(len(rows))]
            texts = partial(decode_rows, RaggedRows(spool, np.uint8))
            label.update(_write(temporary, texts, rows, on_progress))
            shutil.rmtree(spool)
        return cls(store, label)

    @classmethod
    def write_rows(
        cls, store: ArtifactStore, texts: Callable[[NDArray[np.int64]], list[str]], rows: NDArray[np.int64]
    ) -> Pairs:
        """Store pairs that are given by row ids.

        Args:
            store: The folder to write.
            texts: Returns the sentences of row ids; different ids are different sentences.
            rows: (n, 2) row ids of different pairs.

        Raises:
            CorpusCacheError: The folder cannot be written.
        """
        with write_cache_folder(store, _LABEL, "storage.runs") as (temporary, label):
            label.update(_write(temporary, texts, rows))
        return cls(store, label)

    @classmethod
    def open(cls, store: ArtifactStore) -> Pairs:
        """Open stored pairs; reads only the label.

        Raises:
            CorpusCacheError: The folder is incomplete.
        """
        return cls(store, fetch_label(store, _LABEL, "pairs"))

    @classmethod
    def open_verified(cls, store: ArtifactStore) -> Pairs:
        """Open stored pairs, and verify the checksums of all files.

        Raises:
            CorpusCacheError: A file is missing or damaged.
        """
        store.fetch_folder()
        if (label := load_verified_label(store.path, _LABEL)) is None:
            raise CorpusCacheError(
                f"{store} is incomplete or damaged (checksum mismatch); delete it and --resume to prepare the pairs again"
            )
        return cls(store, label)

    def __len__(self) -> int:
        return len(self.rows)

    def texts(self, begin: int, end: int) -> tuple[list[str], list[str]]:
        """Return the first and the second sentences of the pairs `begin` to `end` - 1."""
        return _texts(self.sentences.texts, self.rows[begin:end])

    def both(self) -> Iterator[tuple[str, str]]:
        """Iterate over the pairs as tuples."""
        for begin in range(0, len(self), CHUNK):
            yield from zip(*self.texts(begin, begin + CHUNK), strict=True)

    def distinct(self) -> Iterator[str]:
        """Iterate over the distinct sentences."""
        for begin in range(0, len(self.sentences), CHUNK):
            yield from self.sentences.texts(range(begin, min(begin + CHUNK, len(self.sentences))))


def _texts(texts: Callable[[NDArray[np.int64]], list[str]], rows: PairRows) -> tuple[list[str], list[str]]:
    both = texts(rows.T.reshape(-1).astype(np.int64))
    return both[: len(rows)], both[len(rows) :]


def _spooled(folder: Path, pairs: Iterable[tuple[str, str]], on_progress: Progress) -> NDArray[np.int64]:
    """Write all sentences of a stream, and return for each the row of its first occurrence, as (m, 2) for m pairs."""
    digests, read = [np.empty(0, dtype=_DIGEST)], 0
    with RaggedWriter(folder) as writer:
        remaining = iter(pairs)
        while texts := [text.encode() for pair in islice(remaining, CHUNK) for text in pair]:
            writer.append(b"".join(texts), [len(text) for text in texts])
            digest = bytes.fromhex("".join(bytes_checksum(text, _DIGEST.itemsize) for text in texts))
            digests.append(np.frombuffer(digest, dtype=_DIGEST))
            read += len(texts)
            on_progress(read)
        writer.finish()
    joined = np.concatenate(digests)
    digests.clear()
    order = np.lexsort((joined["low"], joined["high"]))  # stable: equal sentences stay in the stream's order
    ordered = joined[order]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    del joined, ordered  # half of the memory
    first = np.empty(len(order), dtype=np.int64)
    first[order] = order[is_first][np.cumsum(is_first) - 1]
    return first.reshape(-1, 2)


def _first_of_each(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first of each group of equal pairs, in their order."""
    keys = rows[:, 0] * (2 * len(rows)) + rows[:, 1]
    _, first = np.unique(keys, return_index=True)
    return np.asarray(rows[np.sort(first)])


def _write(
    folder: Path,
    texts: Callable[[NDArray[np.int64]], list[str]],
    rows: NDArray[np.int64],
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the sentences of pairs and their rows, and return the label's content."""
    used, inverse = np.unique(rows, return_inverse=True)
    np.save(folder / _ROWS, inverse.reshape(-1, 2).astype(np.int32))
    parts = (used[begin : begin + CHUNK] for begin in range(0, len(used), CHUNK))
    _, fingerprint = write_sentences(folder, (text for part in parts for text in texts(part)), on_progress)

    def lines() -> Iterator[bytes]:
        for begin in range(0, len(rows), CHUNK):
            for one, other in zip(*_texts(texts, rows[begin : begin + CHUNK]), strict=True):
                yield f"{one}\t{other}\n".encode()

    return {"sentences": {"fingerprint": fingerprint, "blank_rows": 0}, "fingerprint": sha256(lines())}
