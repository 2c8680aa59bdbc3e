"""The token table of pairs for cross-encoders: each pair tokenized once as one text, and memory-mapped by every worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.data.pairs import Pairs
from distcse.data.ragged import RaggedRows, RaggedWriter, fetch_label, find_cached, write_cache_folder
from distcse.data.token_table import id_dtype, tokenizer_fingerprint, tokenizing, truncation_side
from distcse.events import CHUNK
from distcse.storage import content_key

FORMAT = 1
_LABEL = "pair_tokens.json"


class PairTokenTable:
    """Memory-mapped token ids, and token type ids where the tokenizer has them, of n pairs.

    With both orders, rows n to 2n - 1 are the pairs with their sentences swapped.

    Args:
        directory: Folder that `prepare` wrote.
        label: Content of its label file.
        reused: Whether an earlier call tokenized the pairs.
    """

    def __init__(self, directory: Path, label: dict[str, Any], reused: bool) -> None:
        self.directory = directory
        self.pad_id: int = label["pad_id"]
        self.has_kinds: bool = label["has_kinds"]
        """Whether there are token type ids."""
        self.reused = reused
        self._rows = RaggedRows(directory, label["dtype"])  # a row's token ids, followed by its token type ids

    @classmethod
    def prepare(
        cls,
        pairs: Pairs,
        tokenizer: Any,
        max_length: int,
        both_orders: bool,
        cache: Path,
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
            TokenizationError: The tokenizer is slow.
            CorpusCacheError: The cache cannot be written.
        """
        has_kinds = "token_type_ids" in tokenizer.model_input_names
        settings = [truncation_side(tokenizer), max_length, both_orders, has_kinds]
        key = content_key([FORMAT, pairs.fingerprint, tokenizer_fingerprint(tokenizer), *settings])
        directory = cache / "pair_tokens" / key
        if (label := find_cached(directory, _LABEL)) is not None:
            return cls(directory, label, reused=True)
        with write_cache_folder(directory, _LABEL) as (temporary, label):
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
        return cls(directory, label, reused=False)

    @classmethod
    def open(cls, directory: Path) -> PairTokenTable:
        """Open a table that `prepare` wrote.

        Raises:
            CorpusCacheError: The folder is incomplete or damaged.
        """
        return cls(directory, fetch_label(directory, _LABEL, "token table"), reused=True)

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
