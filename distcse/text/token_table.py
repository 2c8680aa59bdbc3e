"""Token tables of a corpus and of pairs: tokenized once, and memory-mapped by every worker.

    <cache>/tokens/<key>               values.bin, offsets.npy, tokens.json
    <cache>/tokens/<key>.parts/0-1000000    the same of the rows 0 to 999,999, until the table is written
    <cache>/pair_tokens/<key>          values.bin, offsets.npy, pair_tokens.json

A large corpus is tokenized in parts, which several machines can make at the same time, and which a killed run leaves behind.
The table is their concatenation, byte for byte the one of a single pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from distcse.errors import TokenizerError
from distcse.events import CHUNK
from distcse.recipe import Role
from distcse.storage import ArtifactStore, content_key, text_checksum
from distcse.text.corpus import Corpus
from distcse.text.pairs import Pairs
from distcse.text.ragged import RaggedRows, RaggedWriter, RowIds, fetch_label, find_cached, write_cache_folder

FORMAT = 2
PART_ROWS = 1_000_000
"""Rows of a part; half a minute of one thread. A corpus with no more has no parts."""
_LABEL = "tokens.json"
_PAIR_FORMAT = 1
_PAIR_LABEL = "pair_tokens.json"
_PART = re.compile(r"\d+-\d+")


@dataclass(frozen=True)
class Reading:
    """How an encoder reads the texts of a role."""

    prompt: str
    """Prefix or template of the texts; may be empty."""
    max_length: int
    """Maximum number of tokens, with special tokens."""


@dataclass(frozen=True)
class Tokenization:
    """What determines the tokens of a corpus, and where they are stored.

    Attributes:
        corpus: The sentences.
        tokenizer: A fast Hugging Face tokenizer; its truncation and padding settings are restored.
        readings: The prefix and maximum length of each role's sentences.
        cache: Folder of the caches.
        part_rows: Rows of a part. Default: `PART_ROWS`.
    """

    corpus: Corpus
    tokenizer: Any
    readings: Mapping[Role, Reading]
    cache: ArtifactStore
    part_rows: int = PART_ROWS

    @cached_property
    def store(self) -> ArtifactStore:
        """The table's folder."""
        identity: list[Any] = [
            FORMAT,
            self.corpus.fingerprint,
            tokenizer_fingerprint(self.tokenizer),
            truncation_side(self.tokenizer),
        ]
        for role in sorted(self.corpus.roles):
            reading = self.readings[role]
            identity += [reading.max_length, reading.prompt, *([] if role == "text" else [role])]
        return self.cache / "tokens" / content_key(identity)

    @property
    def parts_store(self) -> ArtifactStore:
        """The folder of the parts. Who lets parts be written, or makes the table of them, holds its lease."""
        return self.store.parent / f"{self.store.name}.parts"

    @property
    def parts(self) -> list[range]:
        """The rows of each part; one part if the corpus is small."""
        rows = len(self.corpus)
        return [range(first, min(first + self.part_rows, rows)) for first in range(0, rows, self.part_rows)]

    @property
    def has_parts(self) -> bool:
        """Whether the corpus is so large that parts of its tokens are stored."""
        return len(self.corpus) > self.part_rows

    def missing_parts(self) -> list[int]:
        """Return the numbers of the parts that are not stored yet."""
        return [number for number in range(len(self.parts)) if self._find_part(number) is None]

    def write_part(self, number: int, on_progress: Callable[[int], None] | None = None) -> None:
        """Tokenize the rows of a part, and store them.

        Args:
            number: The part's number.
            on_progress: Called with the number of its sentences tokenized so far.

        Raises:
            TokenizerError: The tokenizer is slow, or returns no token for a sentence.
            CorpusCacheError: The cache cannot be written.
        """
        rows = self.parts[number]
        report = None if on_progress is None else lambda done: on_progress(done - rows.start)
        with self._written(self._part(number)) as writer:
            self._tokenize(rows, writer, report)

    def write_table(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Store the table: tokenize all rows, except those of parts that are stored. The parts are deleted.

        Args:
            on_progress: Called with the number of sentences of the table so far.

        Raises:
            TokenizerError: As for `write_part`.
            CorpusCacheError: As for `write_part`.
        """
        with self._written(self.store) as writer:
            for number, rows in enumerate(self.parts):
                part = self._find_part(number) if self.has_parts else None
                if part is None:
                    self._tokenize(rows, writer, on_progress)
                    continue
                writer.append_table(part)
                if on_progress is not None:
                    on_progress(rows.stop)
        if self.has_parts:
            for name in filter(_PART.fullmatch, self.parts_store.list_names()):  # also those of another size
                (self.parts_store / name).delete_folder()

    @contextmanager
    def _written(self, folder: ArtifactStore) -> Iterator[RaggedWriter]:
        with write_cache_folder(folder, _LABEL) as (temporary, label):
            # Without a padding token, any valid id serves: the attention mask hides it.
            label.update(dtype=self._dtype.str, pad_id=self.tokenizer.pad_token_id or 0)
            with RaggedWriter(temporary) as writer:
                yield writer
                label["rows"] = writer.finish()

    def _tokenize(self, rows: range, writer: RaggedWriter, on_progress: Callable[[int], None] | None) -> None:
        for first in range(rows.start, rows.stop, CHUNK):
            chunk = range(first, min(first + CHUNK, rows.stop))
            texts, ids = self.corpus.texts(chunk), list[list[int]]()
            for role, run in self.corpus.role_runs(chunk):
                reading = self.readings[role]
                with tokenizing(self.tokenizer, reading.max_length) as backend:
                    ids += encode_batch(backend, [reading.prompt + text for text in texts[run]])
            _require_tokens(ids, texts, first)
            writer.append_rows(ids, self._dtype)
            if on_progress is not None:
                on_progress(chunk.stop)

    @cached_property
    def _dtype(self) -> np.dtype[Any]:
        return id_dtype(self.tokenizer)

    def _part(self, number: int) -> ArtifactStore:
        rows = self.parts[number]
        return self.parts_store / f"{rows.start}-{rows.stop}"

    def _find_part(self, number: int) -> RaggedRows | None:
        """Open a part; None if it is missing or damaged."""
        folder = self._part(number)
        return None if find_cached(folder, _LABEL) is None else RaggedRows(folder.path, self._dtype)


class TokenTable:
    """Memory-mapped token ids of every row of a corpus, with special tokens, truncated to a maximum length.

    Args:
        store: Folder that `prepare` wrote.
        label: Content of its label file.
        reused: Whether an earlier call tokenized the corpus.
    """

    def __init__(self, store: ArtifactStore, label: dict[str, Any], reused: bool) -> None:
        self.store = store
        self.pad_id: int = label["pad_id"]
        self.reused = reused
        self._rows = RaggedRows(store.path, label["dtype"])

    @classmethod
    def prepare(
        cls,
        corpus: Corpus,
        tokenizer: Any,
        max_length: int,
        cache: ArtifactStore,
        on_progress: Callable[[int], None] | None = None,
        prompt: str = "",
    ) -> TokenTable:
        """Tokenize the corpus, or reuse a table of the same corpus, tokenizer, length and prompt.

        Args:
            corpus: The sentences.
            tokenizer: A fast Hugging Face tokenizer; its truncation and padding settings are restored.
            max_length: Maximum number of tokens per sentence, with special tokens.
            cache: Folder of the caches.
            on_progress: Called with the number of sentences tokenized so far.
            prompt: Prefix of every sentence. Default: none.

        Raises:
            TokenizerError: The tokenizer is slow, or returns no token for a sentence.
            CorpusCacheError: The cache cannot be written.
        """
        # Without parts: this process does not hold their lease.
        readings = dict.fromkeys(get_args(Role), Reading(prompt, max_length))
        wanted = Tokenization(corpus, tokenizer, readings, cache, part_rows=max(1, len(corpus)))
        if (found := cls.find(wanted)) is not None:
            return found
        wanted.write_table(on_progress)
        return cls(wanted.store, fetch_label(wanted.store, _LABEL, "token table"), reused=False)

    @classmethod
    def find(cls, wanted: Tokenization) -> TokenTable | None:
        """Return the table in the cache, with its checksums verified; None if there is none."""
        label = find_cached(wanted.store, _LABEL)
        return None if label is None else cls(wanted.store, label, reused=True)

    @classmethod
    def open(cls, store: ArtifactStore) -> TokenTable:
        """Open a table that `prepare` wrote.

        Raises:
            CorpusCacheError: The folder is incomplete or damaged.
        """
        return cls(store, fetch_label(store, _LABEL, "token table"), reused=True)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, ids: RowIds) -> list[NDArray[np.integer]]:
        """Return the token ids of rows, as views into the memory map."""
        return self._rows.rows(ids)

    def lengths(self, ids: RowIds) -> NDArray[np.int64]:
        """Return the number of tokens in each row, with special tokens."""
        return self._rows.lengths(ids)


class PairTokenTable:
    """Memory-mapped token ids, and token type ids where the tokenizer has them, of n pairs.

    With both orders, rows n to 2n - 1 are the pairs with their sentences swapped.

    Args:
        store: Folder that `prepare` wrote.
        label: Content of its label file.
        reused: Whether an earlier call tokenized the pairs.
    """

    def __init__(self, store: ArtifactStore, label: dict[str, Any], reused: bool) -> None:
        self.store = store
        self.pad_id: int = label["pad_id"]
        self.has_kinds: bool = label["has_kinds"]
        """Whether there are token type ids."""
        self.reused = reused
        self._rows = RaggedRows(store.path, label["dtype"])  # a row's token ids, followed by its token type ids

    @classmethod
    def prepare(
        cls,
        pairs: Pairs,
        tokenizer: Any,
        max_length: int,
        both_orders: bool,
        cache: ArtifactStore,
        on_progress: Callable[[int], None] | None = None,
    ) -> PairTokenTable:
        """Tokenize the pairs, or reuse a table of the same pairs, tokenizer and length.

        Args:
            pairs: The pairs.
            tokenizer: A fast Hugging Face tokenizer; its truncation and padding settings are restored.
            max_length: Maximum number of tokens per pair, with special tokens; the longer sentence is truncated first.
            both_orders: Whether to tokenize each pair also with its sentences swapped.
            cache: Folder of the caches.
            on_progress: Called with the number of rows tokenized so far.

        Raises:
            TokenizerError: The tokenizer is slow.
            CorpusCacheError: The cache cannot be written.
        """
        has_kinds = "token_type_ids" in tokenizer.model_input_names
        settings = [truncation_side(tokenizer), max_length, both_orders, has_kinds]
        key = content_key([_PAIR_FORMAT, pairs.fingerprint, tokenizer_fingerprint(tokenizer), *settings])
        store = cache / "pair_tokens" / key
        if (label := find_cached(store, _PAIR_LABEL)) is not None:
            return cls(store, label, reused=True)
        with write_cache_folder(store, _PAIR_LABEL) as (temporary, label):
            dtype = id_dtype(tokenizer)
            label.update(dtype=dtype.str, pad_id=tokenizer.pad_token_id or 0, has_kinds=has_kinds)
            with RaggedWriter(temporary) as writer, tokenizing(tokenizer, max_length) as backend:
                for order in range(2 if both_orders else 1):
                    for begin in range(0, len(pairs), CHUNK):
                        texts = pairs.texts(begin, begin + CHUNK)
                        encodings = backend.encode_batch_fast(list(zip(*texts[:: -1 if order else 1], strict=True)))
                        rows = [row.ids + row.type_ids if has_kinds else row.ids for row in encodings]
                        writer.append_rows(rows, dtype)
                        if on_progress is not None:
                            on_progress(order * len(pairs) + begin + len(rows))
                writer.finish()
        return cls(store, label, reused=False)

    @classmethod
    def open(cls, store: ArtifactStore) -> PairTokenTable:
        """Open a table that `prepare` wrote.

        Raises:
            CorpusCacheError: The folder is incomplete or damaged.
        """
        return cls(store, fetch_label(store, _PAIR_LABEL, "token table"), reused=True)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(
        self, ids: Iterable[int] | NDArray[np.int64]
    ) -> tuple[list[NDArray[np.integer]], list[NDArray[np.integer]] | None]:
        """Return the token ids and the token type ids of rows, as views into the memory map; None without type ids."""
        rows = self._rows.rows(ids)
        if not self.has_kinds:
            return rows, None
        return [row[: len(row) // 2] for row in rows], [row[len(row) // 2 :] for row in rows]


@dataclass(frozen=True)
class SampledTokens:
    """How a tokenizer reads a sample of texts.

    Attributes:
        lengths: (n,) numbers of tokens of n texts, or of n pairs of texts, with special tokens, without truncation.
        unknown_share: Share of the tokens, without special ones, that the tokenizer does not know; 0 if it knows every text.
    """

    lengths: NDArray[np.int64]
    unknown_share: float

    @classmethod
    def of(cls, tokenizer: Any, texts: list[str] | list[tuple[str, str]]) -> SampledTokens:
        """Tokenize a sample of texts with a fast Hugging Face tokenizer."""
        with tokenizing(tokenizer, None) as backend:
            rows = encode_batch(backend, texts)
        ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
        special = {getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "cls", "sep", "pad", "mask")}
        words = ids[~np.isin(ids, [token for token in special if token is not None])]
        unknown = tokenizer.unk_token_id  # GPT-2's is its end of text, and in no text
        share = 0.0 if unknown is None or not len(words) else float((words == unknown).mean())
        return cls(np.array([len(row) for row in rows], dtype=np.int64), share)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a hash of everything that determines a tokenizer's output, except truncation and padding.

    Raises:
        TokenizerError: The tokenizer is slow.
    """
    content = json.loads(_backend(tokenizer).to_str())
    content.pop("truncation", None)
    content.pop("padding", None)
    return text_checksum(json.dumps(content, sort_keys=True))


def _backend(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(
            f"tokenizer {type(tokenizer).__name__} is slow; save the fast one (tokenizer.json) in the model's folder"
        )
    return backend


def truncation_side(tokenizer: Any) -> str:
    """Return the side at which a tokenizer truncates."""
    return str(getattr(tokenizer, "truncation_side", "right"))


def id_dtype(tokenizer: Any) -> np.dtype[Any]:
    """Return the smaller of two types that holds all token ids."""
    # The largest id, not the number of tokens, because ids may have gaps.
    largest = max(_backend(tokenizer).get_vocab(with_added_tokens=True).values(), default=0)
    return np.dtype(np.uint16 if largest < 2**16 else np.int32)


@contextmanager
def tokenizing(tokenizer: Any, max_length: int | None) -> Iterator[Any]:
    """Yield the Rust tokenizer with truncation, or none, and without padding; restore its settings afterwards."""
    backend = _backend(tokenizer)
    truncation, padding = backend.truncation, backend.padding
    backend.no_truncation()
    if max_length is not None:
        backend.enable_truncation(max_length, direction=truncation_side(tokenizer))
    backend.no_padding()
    try:
        yield backend
    finally:
        backend.no_truncation()
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def encode_batch(backend: Any, texts: list[str] | list[tuple[str, str]]) -> list[list[int]]:
    """Tokenize with the Rust tokenizer directly, because its Python wrapper builds five unused lists per sentence."""
    return [encoding.ids for encoding in backend.encode_batch_fast(texts)]


def _require_tokens(ids: list[list[int]], texts: list[str], first: int) -> None:
    """Raise for a sentence without tokens: its attention is NaN, as is every similarity list with it."""
    for number, row in enumerate(ids):
        if not row:
            raise TokenizerError(
                f"corpus row {first + number}, {texts[number][:60]!r}: the tokenizer returns no token; remove the row"
            )
