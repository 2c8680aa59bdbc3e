"""The token table: a corpus tokenised once by one tokenizer, memory-mapped by every worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.data.corpus import Corpus
from distcse.data.ragged import RaggedRows, RaggedWriter, RowIds, is_kept, labelled, making
from distcse.errors import CorpusCacheError, TokenizationError
from distcse.files import text_checksum
from distcse.storage import fetch_folder

FORMAT = 2
_LABEL = "tokens.json"
_CHUNK = 8192


class TokenTable:
    """Token ids of every row, special tokens included, cut to a maximum length."""

    def __init__(self, directory: Path, described: dict[str, Any], reused: bool) -> None:
        self.directory = directory
        self.pad_id: int = described["pad_id"]
        self.reused = reused
        """Whether an earlier call had tokenised the corpus."""
        self._rows = RaggedRows(directory, described["dtype"])

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
        """Tokenise the corpus, or reuse the table of an earlier call.

        Args:
            corpus: The sentences.
            tokenizer: A fast Hugging Face tokenizer; left as it was found.
            max_length: Tokens kept of a sentence, special tokens included.
            cache: Folder of token tables.
            on_progress: Told the number of sentences done.
            prompt: Text put before every sentence.

        Raises:
            CorpusError: The tokenizer is not a fast one, or makes no token of some sentence.
        """
        described = [FORMAT, corpus.fingerprint, tokenizer_fingerprint(tokenizer), _side(tokenizer), max_length, prompt]
        key = text_checksum(json.dumps(described))
        directory = cache / "tokens" / key
        if (label := is_kept(directory, _LABEL)) is not None:
            return cls(directory, label, reused=True)
        with making(directory, _LABEL) as (beside, label):
            dtype = _dtype(tokenizer)
            # A tokenizer without a padding token gets 0 there: the mask hides it, so any valid id will do.
            label.update(dtype=dtype.str, pad_id=tokenizer.pad_token_id or 0, rows=len(corpus))
            with RaggedWriter(beside) as writer, _truncating(tokenizer, max_length) as backend:
                for first in range(0, len(corpus), _CHUNK):
                    texts = corpus.texts(range(first, min(first + _CHUNK, len(corpus))))
                    ids = _ids(backend, [prompt + text for text in texts] if prompt else texts)
                    _require_tokens(ids, texts, first)
                    values = np.concatenate([np.asarray(row, dtype=dtype) for row in ids])
                    writer.append(values.tobytes(), [len(row) for row in ids])
                    if on_progress is not None:
                        on_progress(first + len(texts))
                writer.finish()
        return cls(directory, label, reused=False)

    @classmethod
    def open(cls, directory: Path) -> TokenTable:
        """A table prepared before."""
        fetch_folder(directory)
        described = labelled(directory, _LABEL)
        if described is None:
            raise CorpusCacheError(f"{directory} holds no whole token table; start the run again to prepare it")
        return cls(directory, described, reused=True)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, ids: RowIds) -> list[NDArray[np.integer]]:
        """Token ids of rows, views into the map."""
        return self._rows.rows(ids)

    def lengths(self, ids: RowIds) -> NDArray[np.int64]:
        """Tokens in each of the rows, special tokens included."""
        return self._rows.lengths(ids)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of all that decides a tokenizer's output, its truncation and padding settings apart."""
    described = json.loads(_backend(tokenizer).to_str())
    described.pop("truncation", None)
    described.pop("padding", None)
    return text_checksum(json.dumps(described, sort_keys=True))


def _backend(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TokenizationError(
            f"tokenizer {type(tokenizer).__name__} is not a fast one; save it with a tokenizer.json beside the model"
        )
    return backend


def _side(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "truncation_side", "right"))


def _dtype(tokenizer: Any) -> np.dtype[Any]:
    # The largest id, not the number of tokens: a vocabulary may have holes.
    largest = max(_backend(tokenizer).get_vocab(with_added_tokens=True).values(), default=0)
    return np.dtype(np.uint16 if largest < 2**16 else np.int32)


@contextmanager
def _truncating(tokenizer: Any, max_length: int) -> Iterator[Any]:
    """The Rust tokenizer, set to cut and not to pad; its own settings come back afterwards."""
    backend = _backend(tokenizer)
    truncation, padding = backend.truncation, backend.padding
    backend.enable_truncation(max_length, direction=_side(tokenizer))
    backend.no_padding()
    try:
        yield backend
    finally:
        backend.no_truncation()
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def _ids(backend: Any, texts: list[str]) -> list[list[int]]:
    """Straight from the Rust tokenizer: the wrapper around it builds five lists a sentence that nobody reads."""
    return [encoding.ids for encoding in backend.encode_batch_fast(texts)]


def _require_tokens(ids: list[list[int]], texts: list[str], first: int) -> None:
    """Attention over no token is not a number, and one such row would spoil every list it is in."""
    for number, row in enumerate(ids):
        if not row:
            raise TokenizationError(
                f"corpus row {first + number}, {texts[number][:60]!r}: the tokenizer makes no token of it; remove it"
            )
