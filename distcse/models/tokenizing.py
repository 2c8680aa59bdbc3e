"""Tokenization of the texts and pairs that a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distcse.compat.transformers import only_calls_rust

TOKENIZED_TEXTS = 8192
"""Texts per call of a tokenizer, whose output of 30 tokens takes 4 KB until the call's ids are taken from it."""


def tokenize(tokenizer: Any, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """Return the token ids of texts, with special tokens and truncated.

    The Rust tokenizer is called directly: transformers builds a dictionary and four lists of each text, which takes the
    interpreter longer than a GPU needs to encode the text, and meanwhile no forward pass can be launched. Tokenizers whose
    class replaces transformers' methods are called as they are.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        texts: At most `TOKENIZED_TEXTS` texts.
        max_length: Maximum number of tokens of a text, with special tokens.
    """
    if only_calls_rust(tokenizer):
        return [encoding.ids for encoding in _encode(tokenizer, list(texts), max_length)]
    ids: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=max_length)["input_ids"]
    return ids


def tokenize_pairs(
    tokenizer: Any, pairs: Sequence[tuple[str, str]], max_length: int
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Return the token ids of pairs, and their token type ids if the tokenizer has them; see `tokenize`.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        pairs: At most `TOKENIZED_TEXTS` pairs.
        max_length: Maximum number of tokens of a pair, with special tokens; the longer text is truncated first.
    """
    if only_calls_rust(tokenizer):
        encodings = _encode(tokenizer, list(pairs), max_length)
        has_kinds = "token_type_ids" in tokenizer.model_input_names
        return [each.ids for each in encodings], [each.type_ids for each in encodings] if has_kinds else None
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    encoded = tokenizer(first, second, truncation="longest_first", max_length=max_length)
    return encoded["input_ids"], encoded.get("token_type_ids")


def _encode(tokenizer: Any, inputs: list[str] | list[tuple[str, str]], max_length: int) -> list[Any]:
    """Return the `tokenizers.Encoding` of each text or pair, as transformers would compute it."""
    from transformers.tokenization_utils_base import TruncationStrategy
    from transformers.utils import PaddingStrategy

    tokenizer.set_truncation_and_padding(
        padding_strategy=PaddingStrategy.DO_NOT_PAD,
        truncation_strategy=TruncationStrategy.LONGEST_FIRST,
        max_length=max_length,
        stride=0,
        pad_to_multiple_of=None,
        padding_side=None,
    )
    backend = tokenizer.backend_tokenizer
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        backend.encode_special_tokens = tokenizer.split_special_tokens
    encodings: list[Any] = backend.encode_batch_fast(inputs)
    return encodings
