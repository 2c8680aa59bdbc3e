"""The training corpus: sentences with stable row ids and a fingerprint, read once into the cache and memory-mapped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from distcse.errors import CorpusTooSmallError
from distcse.events import CHUNK
from distcse.recipe import CorpusSection, Role
from distcse.storage import ArtifactStore, Digest, text_checksum
from distcse.text.ragged import RaggedRows, RaggedWriter, RowIds, fetch_label, find_cached, write_cache_folder
from distcse.text.row_keys import DistinctRows, RowKeys
from distcse.text.sampler import BatchSampler, RowSet, split_held_out
from distcse.text.sources import Source

FORMAT = 2
_LABEL = "corpus.json"
_NOT_WORDS = re.compile(r"[\W_]+")

Progress = Callable[[int], None]
P = ParamSpec("P")
T = TypeVar("T")


def normalized_key(sentence: str) -> str:
    """Return the key that equal sentences share; empty for a sentence without a letter or digit."""
    return _NOT_WORDS.sub(" ", sentence.casefold()).strip()


@dataclass(frozen=True)
class Excluded:
    """Sentences that are left out of a corpus, such as those of the evaluation.

    Attributes:
        keys: The sentences' normalized keys.
    """

    keys: frozenset[str]

    @classmethod
    def of(cls, sentences: Iterable[str]) -> Excluded:
        """Exclude these sentences, and all with the same normalized key."""
        return cls(frozenset(key for sentence in sentences if (key := normalized_key(sentence))))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the keys, independent of their order."""
        return text_checksum("\n".join(sorted(self.keys)))

    def holds(self, sentence: str) -> bool:
        """Return whether the sentence is excluded."""
        return normalized_key(sentence) in self.keys


@dataclass(frozen=True)
class CorpusPart:
    """The rows of one source."""

    role: Role
    weight: float
    """How often an epoch has each row."""
    first: int
    """Id of the first row."""
    stop: int
    """One more than the id of the last."""


class Corpus:
    """A memory-mapped corpus of n sentences, with row ids 0 to n - 1 in the order of the sources' non-blank rows.

    Args:
        store: Folder that `prepare` wrote.
        label: Content of its label file.
        reused: Whether an earlier call prepared it.
    """

    def __init__(self, store: ArtifactStore, label: dict[str, Any], reused: bool) -> None:
        self.store = store
        self.fingerprint: str = label["fingerprint"]
        """Hash of the sentences, their order and roles, independent of the source's file or format."""
        self.blank_rows: int = label["blank_rows"]
        """Number of rows without text, which are skipped."""
        self.excluded_rows: int = label.get("excluded_rows", 0)
        """Number of rows that are sentences of the evaluation, which are skipped."""
        self.doubled_rows: int = label.get("doubled_rows", 0)
        """Number of duplicates that are kept."""
        self.removed_duplicates: int = label.get("removed_duplicates", 0)
        """Number of duplicates that were left out."""
        self.sources: list[str] = label.get("sources", [])
        """Files or data sets."""
        self.reused = reused
        self._rows = RaggedRows(store.path, np.uint8)
        self.parts = _parts_of(label, len(self._rows))
        """The rows of each source, in their order."""
        self._keys: RowKeys | None = None

    @classmethod
    def prepare(
        cls,
        section: CorpusSection,
        cache: ArtifactStore,
        on_progress: Progress | None = None,
        excluded: Excluded | None = None,
    ) -> Corpus:
        """Read the sources into the cache, or reuse a corpus prepared from the same content.

        Args:
            section: The recipe's `corpus`.
            cache: Folder of the caches.
            on_progress: Called with the number of sentences read so far.
            excluded: Sentences to leave out. Default: none.

        Raises:
            CorpusError: A source is missing or malformed, or the cache cannot be written. Nothing is left in the cache.
        """
        corpus = cls._prepare_all(section, cache, on_progress, excluded)
        if not corpus.doubled_rows:
            return corpus
        if section.deduplicate == "exact":
            return corpus._without_duplicates(cache)
        corpus._keys = corpus.keys(cache)  # for `split_held_out`, verified once
        return corpus

    @classmethod
    def _prepare_all(
        cls, section: CorpusSection, cache: ArtifactStore, on_progress: Progress | None, excluded: Excluded | None
    ) -> Corpus:
        """Prepare the corpus with its duplicates."""
        sources = Source.all_of(section)
        directory = cache / "corpora" / _key(sources, excluded)
        if (cached := find_cached(directory, _LABEL)) is not None:
            return cls(directory, cached, reused=True)
        with write_cache_folder(directory, _LABEL) as (temporary, label):
            label.update(_write(temporary, sources, excluded, on_progress))
            label.update(sources=[name for source in sources for name in source.names])
            texts = partial(_marked_texts, RaggedRows(temporary, np.uint8), _parts_of(label, label["rows"]))
            keys = RowKeys.prepare(texts, label["rows"], label["fingerprint"], cache)
            label.update(doubled_rows=len(keys) - keys.distinct)
        return cls(directory, label, reused=False)

    def _without_duplicates(self, cache: ArtifactStore) -> Corpus:
        """Prepare the corpus of the first rows of this corpus's distinct sentences, or reuse it."""
        directory = self._without_duplicates_at(cache)
        if (cached := find_cached(directory, _LABEL)) is not None:
            return type(self)(directory, cached, reused=True)
        first = self.distinct_rows(cache).first
        with write_cache_folder(directory, _LABEL) as (temporary, label):
            blocks = (first[begin : begin + CHUNK] for begin in range(0, len(first), CHUNK))
            written, content = write_sentences(temporary, chain.from_iterable(map(self.texts, blocks)))
            stops = np.searchsorted(first, [part.stop for part in self.parts]).tolist()
            bounds = pairwise([0, *stops])
            parts = [
                replace(part, first=begin, stop=stop) for part, (begin, stop) in zip(self.parts, bounds, strict=True)
            ]
            label.update(
                _parts_label(parts, content),
                rows=written,
                blank_rows=self.blank_rows,
                excluded_rows=self.excluded_rows,
                removed_duplicates=self.doubled_rows,
                format=FORMAT,
                sources=self.sources,
            )
        return type(self)(directory, label, reused=False)

    def _without_duplicates_at(self, cache: ArtifactStore) -> ArtifactStore:
        return cache / "corpora" / text_checksum(json.dumps(["without duplicates", FORMAT, self.store.name]))

    @classmethod
    def find(cls, section: CorpusSection, cache: ArtifactStore, excluded: Excluded | None = None) -> Corpus | None:
        """Return the corpus if the cache has it, as `prepare` would; None if it would be read.

        Raises:
            CorpusError: The source is missing.
        """
        directory = cache / "corpora" / _key(Source.all_of(section), excluded)
        if (cached := find_cached(directory, _LABEL)) is None:
            return None
        corpus = cls(directory, cached, reused=True)
        if not corpus.doubled_rows:
            return corpus
        if section.deduplicate == "none":
            corpus._keys = RowKeys.find(corpus.fingerprint, cache)
            return None if corpus._keys is None else corpus
        directory = corpus._without_duplicates_at(cache)
        return None if (cached := find_cached(directory, _LABEL)) is None else cls(directory, cached, reused=True)

    @classmethod
    def open(cls, store: ArtifactStore) -> Corpus:
        """Open a corpus that `prepare` wrote.

        Raises:
            CorpusCacheError: The folder is incomplete or damaged.
        """
        return cls(store, fetch_label(store, _LABEL, "corpus"), reused=True)

    def __len__(self) -> int:
        return len(self._rows)

    def texts(self, ids: RowIds) -> list[str]:
        """Return the sentences of row ids, in the order of the ids."""
        return decode_rows(self._rows, ids)

    @property
    def roles(self) -> set[Role]:
        """The roles of the rows."""
        return {part.role for part in self.parts}

    def rows_of_role(self, role: Role) -> NDArray[np.int64]:
        """Return the ids of the rows of a role, ascending."""
        rows = [np.arange(part.first, part.stop) for part in self.parts if part.role == role]
        return np.concatenate([np.empty(0, dtype=np.int64), *rows])

    def role_runs(self, ids: Sequence[int] | NDArray[np.int64]) -> list[tuple[Role, slice]]:
        """Split row ids into runs of rows with one role; return each run's role and places."""
        if len(self.parts) == 1 or not len(ids):
            return [(self.parts[0].role, slice(0, len(ids)))]
        numbers = np.searchsorted([part.stop for part in self.parts], np.asarray(ids), side="right")
        stops = [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        return [
            (self.parts[numbers[begin]].role, slice(begin, stop))
            for begin, stop in zip([0, *stops], stops, strict=False)
        ]

    def encode(self, ids: NDArray[np.int64], encode: Callable[..., NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the (n, d) vectors of n row ids, from a function like `Encoder.encode`, which gets texts of one role."""
        order = np.argsort(ids, kind="stable")
        runs = self.role_runs(ids[order])
        if len(runs) == 1:
            return of_role(encode, runs[0][0])(self.texts(ids))
        encoded = np.concatenate([of_role(encode, role)(self.texts(ids[order[run]])) for role, run in runs])
        vectors = np.empty_like(encoded)
        vectors[order] = encoded
        return vectors

    def keys(self, cache: ArtifactStore) -> RowKeys:
        """Return the sorted keys of the sentences, from the cache or newly computed; equal texts of two roles have two.

        Raises:
            CorpusCacheError: The cache cannot be written.
        """
        return RowKeys.prepare(partial(_marked_texts, self._rows, self.parts), len(self), self.fingerprint, cache)

    def sampler(self, rows: RowSet, batch_size: int, seed: int) -> BatchSampler:
        """Return the order of training rows, with the sources' weights.

        Raises:
            CorpusTooSmallError: There are fewer rows than in a batch.
        """
        weights = [(part.stop, part.weight) for part in self.parts]
        return BatchSampler(rows, batch_size, seed, weights if any(weight != 1 for _, weight in weights) else ())

    def distinct_rows(self, cache: ArtifactStore) -> DistinctRows:
        """Return which rows have the same sentence, from the cache or newly computed.

        Raises:
            CorpusCacheError: The cache cannot be written.
        """
        return DistinctRows.prepare(self.keys(cache), self.fingerprint, cache)

    def split_held_out(self, held_out: int, seed: int) -> tuple[RowSet, NDArray[np.int64]]:
        """Split the row ids into (training rows, held-out rows), as the function of that name does.

        Rows with a held-out row's sentence are in neither.

        Raises:
            CorpusTooSmallError: No row would remain for training.
            CorpusCacheError: The sentences' keys cannot be read.
        """
        train, chosen = split_held_out(len(self), held_out, seed)
        if held_out and self.doubled_rows:
            # `prepare` wrote and verified them; a worker only opens them.
            self._keys = self._keys or RowKeys.open(self.fingerprint, self.store.parent.parent)
            train = RowSet(len(self), self._keys.rows_of(_marked_texts(self._rows, self.parts, chosen)))
            if not len(train):
                raise CorpusTooSmallError(
                    f"each of the corpus's {len(self):,} rows has the text of one of the {held_out} held-out rows, so none is "
                    "left to train on; add text, or set evaluation.num_heldout=0 and name a dev set in evaluation.data"
                )
        return train, chosen


def of_role(encode: Callable[P, T], role: Role) -> Callable[P, T]:
    """Return an embedder's `encode` for texts of a role. Plain texts need no argument, so that it may know no roles."""
    return encode if role == "text" else partial(encode, role=role)  # type: ignore[arg-type]


def write_sentences(folder: Path, sentences: Iterator[str], on_progress: Progress | None = None) -> tuple[int, str]:
    """Stream sentences into a folder, and return their number and the hash of them and their order.

    Args:
        folder: An existing folder.
        sentences: The sentences.
        on_progress: Called with the number of sentences written so far.
    """
    digest, written = Digest(), 0
    with RaggedWriter(folder) as writer:
        while chunk := [text.encode() for text in islice(sentences, CHUNK)]:
            for text in chunk:
                digest.update(len(text).to_bytes(8, "little"))
                digest.update(text)
            writer.append(b"".join(chunk), [len(text) for text in chunk])
            written += len(chunk)
            if on_progress is not None:
                on_progress(written)
        writer.finish()
    return written, digest.hexdigest()


def _key(sources: Sequence[Source], excluded: Excluded | None) -> str:
    identity: list[Any] = [FORMAT]
    for source in sources:
        section = source.section
        identity += [source.kind, source.content, section.column, section.limit]
        # Not for `path` without a title: such a corpus keeps the key that it had before there were roles.
        about = {"title": section.title_column, "role": section.role, "weight": section.weight}
        identity += [about] if len(sources) > 1 or about != _PLAIN else []
    identity += [] if excluded is None else [{"excluded": excluded.fingerprint}]
    return text_checksum(json.dumps(identity))


_PLAIN = {"title": None, "role": "text", "weight": 1.0}


def decode_rows(rows: RaggedRows, ids: RowIds) -> list[str]:
    """Return the sentences of row ids, in the order of the ids."""
    return [row.tobytes().decode() for row in rows.rows(ids)]


def _marked_texts(rows: RaggedRows, parts: Sequence[CorpusPart], ids: Iterable[int]) -> list[str]:
    """Return the sentences of row ids with their roles, so that equal texts of two roles differ; `text` adds nothing."""
    texts = decode_rows(rows, ids := np.fromiter(ids, np.int64))
    if all(part.role == "text" for part in parts):
        return texts
    roles = [part.role for part in parts]
    numbers = np.searchsorted([part.stop for part in parts], ids, side="right").tolist()
    return [
        text if roles[part] == "text" else f"{roles[part]}\n{text}" for text, part in zip(texts, numbers, strict=True)
    ]


def _parts_label(parts: Sequence[CorpusPart], content: str) -> dict[str, Any]:
    """Return a label's entries for the parts and the fingerprint of texts with a fingerprint."""
    if len(parts) == 1 and (parts[0].role, parts[0].weight) == ("text", 1.0):
        return {"fingerprint": content}
    roles = [[part.role, part.stop] for part in parts if part.role != "text"]
    fingerprint = text_checksum(json.dumps([content, roles])) if roles else content
    return {"fingerprint": fingerprint, "parts": [asdict(part) for part in parts]}


def _parts_of(label: Mapping[str, Any], rows: int) -> list[CorpusPart]:
    parts = [CorpusPart(**part) for part in label.get("parts", [])]
    return parts or [CorpusPart("text", 1.0, 0, rows)]


def _write(
    folder: Path, sources: Sequence[Source], excluded: Excluded | None, on_progress: Progress | None
) -> dict[str, Any]:
    blank = num_excluded = 0
    counts: list[int] = []

    def kept_rows(source: Source) -> Iterator[str]:
        nonlocal blank, num_excluded
        for row in source.rows():
            is_excluded = row is not None and excluded is not None and excluded.holds(row)
            if row is None:
                blank += 1
            elif is_excluded:
                num_excluded += 1
            else:
                yield row

    def counted_rows(source: Source) -> Iterator[str]:
        counts.append(0)
        for row in islice(kept_rows(source), source.section.limit):
            counts[-1] += 1
            yield row

    written, content = write_sentences(folder, chain.from_iterable(map(counted_rows, sources)), on_progress)
    if not written:
        raise CorpusTooSmallError(
            "the corpus contains no sentence"
            + (f" that is not in the evaluation ({num_excluded:,} are)" if num_excluded else "")
        )
    stops = list(accumulate(counts))
    parts = [
        CorpusPart(source.section.role, source.section.weight, stop - count, stop)
        for source, count, stop in zip(sources, counts, stops, strict=True)
    ]
    return {
        **_parts_label(parts, content),
        "rows": written,
        "blank_rows": blank,
        "excluded_rows": num_excluded,
        "format": FORMAT,
    }
