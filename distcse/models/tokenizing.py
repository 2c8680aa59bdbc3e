"""Tokenization of the texts and pairs that a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distcse.compat.transformers import only_calls_rust

TOKENIZED_TEXTS = 8192
"""Texts per call of a tokenizer, whose output of 30 tokens takes 4 KB until the call's ids are taken from it."""


def tokenize(tokenizer: Any, texts: Sequence[str] | Sequence[tuple[str, str]], max_length: int) -> Sequence[Any]:
    """Tokenize at most `TOKENIZED_TEXTS` texts or pairs, with special tokens, truncated and without padding.

    The Rust tokenizer is called directly: transformers builds a dictionary and four lists of each text, which takes the
    interpreter longer than a GPU needs to encode the text, and meanwhile no forward pass can be launched. Tokenizers whose
    Python code changes the texts are called as they are.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        texts: Texts; or pairs, whose longer text is truncated first.
        max_length: Maximum number of tokens of a text or pair, with special tokens.

    Returns:
        The `tokenizers.Encoding` of each text, with its `ids` and `type_ids`.
    """
    from transformers.tokenization_utils_base import TruncationStrategy
    from transformers.utils import PaddingStrategy

    if not only_calls_rust(tokenizer):
        fields = [list(field) for field in zip(*texts, strict=True)] if isinstance(texts[0], tuple) else [list(texts)]
        encodings: Sequence[Any] = tokenizer(*fields, truncation=True, max_length=max_length).encodings
        return encodings
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
    encodings = backend.encode_batch_fast(list(texts))
    return encodings
