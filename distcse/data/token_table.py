"""The token table: a corpus tokenized once, and memory-mapped by every worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.data.corpus import Corpus
from distcse.data.ragged import RaggedRows, RaggedWriter, RowIds, fetch_label, find_cached, write_cache_folder
from distcse.errors import TokenizationError
from distcse.storage import text_checksum

FORMAT = 2
_LABEL = "tokens.json"
_CHUNK = 8192


class TokenTable:
    """Memory-mapped token ids of every row of a corpus, with special tokens, truncated to a maximum length.

    Args:
        directory: Folder that `prepare` wrote.
        label: Content of its label file.
        reused: Whether an earlier call tokenized the corpus.
    """

    def __init__(self, directory: Path, label: dict[str, Any], reused: bool) -> None:
        self.directory = directory
        self.pad_id: int = label["pad_id"]
        self.reused = reused
        self._rows = RaggedRows(directory, label["dtype"])

    @classmethod
    def prepare(
        cls,
        corpus: Corpus,
        tokenizer: Any,
        max_length: int,
        cache: Path,
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
            TokenizationError: The tokenizer is slow, or returns no token for a sentence.
            CorpusCacheError: The cache cannot be written.
        """
        identity = [
            FORMAT,
            corpus.fingerprint,
            tokenizer_fingerprint(tokenizer),
            truncation_side(tokenizer),
            max_length,
            prompt,
        ]
        key = text_checksum(json.dumps(identity))
        directory = cache / "tokens" / key
        if (label := find_cached(directory, _LABEL)) is not None:
            return cls(directory, label, reused=True)
        with write_cache_folder(directory, _LABEL) as (temporary, label):
            dtype = id_dtype(tokenizer)
            # Without a padding token, any valid id serves: the attention mask hides it.
            label.update(dtype=dtype.str, pad_id=tokenizer.pad_token_id or 0, rows=len(corpus))
            with RaggedWriter(temporary) as writer, truncating(tokenizer, max_length) as backend:
                for first in range(0, len(corpus), _CHUNK):
                    texts = corpus.texts(range(first, min(first + _CHUNK, len(corpus))))
                    ids = encode_batch(backend, [prompt + text for text in texts] if prompt else texts)
                    _require_tokens(ids, texts, first)
                    writer.append_rows(ids, dtype)
                    if on_progress is not None:
                        on_progress(first + len(texts))
                writer.finish()
        return cls(directory, label, reused=False)

    @classmethod
    def open(cls, directory: Path) -> TokenTable:
        """Open a table that `prepare` wrote.

        Raises:
            CorpusCacheError: The folder is incomplete or damaged.
        """
        return cls(directory, fetch_label(directory, _LABEL, "token table"), reused=True)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, ids: RowIds) -> list[NDArray[np.integer]]:
        """Return the token ids of rows, as views into the memory map."""
        return self._rows.rows(ids)

    def lengths(self, ids: RowIds) -> NDArray[np.int64]:
        """Return the number of tokens in each row, with special tokens."""
        return self._rows.lengths(ids)


def count_tokens(tokenizer: Any, texts: list[str]) -> NDArray[np.int64]:
    """Return the (n,) numbers of tokens of n texts, with special tokens, without truncation."""
    backend = _backend(tokenizer)
    truncation = backend.truncation
    backend.no_truncation()
    try:
        return np.array([len(row) for row in encode_batch(backend, texts)], dtype=np.int64)
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a hash of everything that determines a tokenizer's output, except truncation and padding.

    Raises:
        TokenizationError: The tokenizer is slow.
    """
    content = json.loads(_backend(tokenizer).to_str())
    content.pop("truncation", None)
    content.pop("padding", None)
    return text_checksum(json.dumps(content, sort_keys=True))


def _backend(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TokenizationError(
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
def truncating(tokenizer: Any, max_length: int) -> Iterator[Any]:
    """Yield the Rust tokenizer with truncation and without padding; restore its settings afterwards."""
    backend = _backend(tokenizer)
    truncation, padding = backend.truncation, backend.padding
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


def encode_batch(backend: Any, texts: list[str]) -> list[list[int]]:
    """Tokenize with the Rust tokenizer directly, because its Python wrapper builds five unused lists per sentence."""
    return [encoding.ids for encoding in backend.encode_batch_fast(texts)]


def _require_tokens(ids: list[list[int]], texts: list[str], first: int) -> None:
    """Raise for a sentence without tokens: its attention is NaN, as is every similarity list with it."""
    for number, row in enumerate(ids):
        if not row:
            raise TokenizationError(
                f"corpus row {first + number}, {texts[number][:60]!r}: the tokenizer returns no token; remove the row"
            )
