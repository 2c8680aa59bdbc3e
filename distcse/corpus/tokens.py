"""The token table: a corpus tokenised once by one tokenizer, memory-mapped by every worker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.corpus.corpus import Corpus
from distcse.corpus.ragged import RaggedRows, RaggedWriter, is_whole, making
from distcse.errors import CorpusError

FORMAT = 1
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
            tokenizer: A fast Hugging Face tokenizer.
            max_length: Tokens kept of a sentence, special tokens included.
            cache: Folder of token tables.
            on_progress: Told the number of sentences done.
            prompt: Text put before every sentence.
        """
        described = [FORMAT, corpus.fingerprint, tokenizer_fingerprint(tokenizer), max_length, prompt]
        key = hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()
        directory = cache / "tokens" / key
        if (label := is_whole(directory, _LABEL)) is not None:
            return cls(directory, label, reused=True)
        with making(directory, _LABEL) as (beside, label):
            dtype = np.uint16 if len(tokenizer) <= 2**16 else np.int32
            label.update(dtype=np.dtype(dtype).str, pad_id=tokenizer.pad_token_id or 0, rows=len(corpus))
            writer = RaggedWriter(beside)
            for first in range(0, len(corpus), _CHUNK):
                texts = corpus.texts(range(first, min(first + _CHUNK, len(corpus))))
                ids = _ids(tokenizer, [prompt + text for text in texts] if prompt else texts, max_length)
                values = np.concatenate([np.asarray(row, dtype=dtype) for row in ids])
                writer.append(values.tobytes(), [len(row) for row in ids])
                if on_progress is not None:
                    on_progress(first + len(texts))
            writer.finish()
        return cls(directory, label, reused=False)

    @classmethod
    def open(cls, directory: Path) -> TokenTable:
        """A table prepared before."""
        described = is_whole(directory, _LABEL)
        if described is None:
            raise CorpusError(f"{directory} holds no whole token table; start the run again to prepare it")
        return cls(directory, described, reused=True)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, ids: Iterable[int] | NDArray[np.int64]) -> list[NDArray[np.integer]]:
        """Token ids of rows, views into the map."""
        return [self._rows.row(int(number)) for number in ids]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of all that decides a tokenizer's output, its truncation and padding settings apart."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described.pop("truncation", None)
    described.pop("padding", None)
    return hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=16).hexdigest()


def _ids(tokenizer: Any, texts: list[str], max_length: int) -> list[list[int]]:
    """Straight from the Rust tokenizer: the wrapper around it builds five lists a sentence that nobody reads."""
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(max_length)
    backend.no_padding()
    return [encoding.ids for encoding in backend.encode_batch_fast(texts)]
