"""What a model does with texts before its forward pass: checks them, puts them into its prompt, tokenizes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from distcse.compat.transformers import only_calls_rust
from distcse.errors import ArgumentError, EncoderSettingError

SENTENCE = "{sentence}"
"""Place of the text in a prompt that is a template (PromptBERT, Jiang et al. 2022); without it, a prompt is a prefix."""
TOKENIZED_TEXTS = 8192
"""Texts per call of a tokenizer, whose output of 30 tokens takes 4 KB until the call's ids are taken from it."""


def as_texts(texts: Iterable[str]) -> list[str]:
    """Return texts as a list.

    Args:
        texts: A list, tuple, NumPy array, pandas Series, pyarrow array or generator of texts.

    Raises:
        ArgumentError: They are something else, or one of them is not a text, or has half of a surrogate pair; names its place.
    """
    if not _is_list(texts):
        raise ArgumentError(f"expected a list of texts, found {type(texts).__name__}; pass a list of str")
    as_python = getattr(texts, "to_pylist", None)  # pyarrow's values are no str
    found: list[Any] = list(texts if as_python is None else as_python())
    for place, text in enumerate(found):
        if not isinstance(text, str):
            raise ArgumentError(
                f"texts[{place}] is {text!r:.60} ({type(text).__name__}), not a str; correct or remove it"
            )
        _refuse_half_character(text, f"texts[{place}]")
    return found


def as_pairs(pairs: Iterable[Sequence[str]]) -> list[tuple[str, str]]:
    """Return pairs of texts as a list.

    Args:
        pairs: A list, tuple, NumPy array or generator of pairs.

    Raises:
        ArgumentError: They are something else, or one of them is not two texts; names its place.
    """
    if not _is_list(pairs):
        raise ArgumentError(f"expected a list of pairs, found {type(pairs).__name__}; write [(first, second)]")
    found: list[tuple[str, str]] = []
    for place, pair in enumerate(pairs):
        is_pair = isinstance(pair, Sequence | np.ndarray) and not isinstance(pair, str) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise ArgumentError(
                f"pairs[{place}] is {pair!r:.60} ({type(pair).__name__}), not two texts; write [(first, second)]"
            )
        for text in pair:
            _refuse_half_character(text, f"pairs[{place}]")
        found.append((pair[0], pair[1]))
    return found


def _is_list(values: Any) -> bool:
    """Return whether a value is a list or an iterator: no single text, unordered collection, number or table."""
    is_other = isinstance(values, str | bytes | bytearray | memoryview | Mapping | set | frozenset)
    is_table = hasattr(values, "columns")
    return isinstance(values, Iterable) and not is_other and not is_table and getattr(values, "ndim", 1) != 0


def _refuse_half_character(text: str, place: str) -> None:
    """Refuse half of a surrogate pair, which JSON can contain and a tokenizer cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"{place} has {text[error.start]!a}, half of a surrogate pair and no character; remove it"
        ) from None


def is_template(prompt: str) -> bool:
    """Return whether a prompt is a template with `{sentence}`; otherwise it is a prefix."""
    return SENTENCE in prompt


def apply_prompt(tokenizer: Any, texts: Sequence[str], prompt: str, max_length: int) -> list[str]:
    """Insert each text into the prompt. A template truncates long texts, so that the words after them remain.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        texts: The texts.
        prompt: A prefix, a template with `{sentence}`, or empty.
        max_length: Maximum number of tokens of the result, with special tokens; used by templates.

    Raises:
        EncoderSettingError: The template leaves no token for the sentence.
    """
    if not prompt:
        return list(texts)
    if not is_template(prompt):
        return [prompt + text for text in texts]
    available = max_length - len(tokenizer(prompt.replace(SENTENCE, ""))["input_ids"])
    if available < 1:
        raise EncoderSettingError(f"prompt {prompt!r} needs all {max_length} tokens; raise max_length")
    truncated = tokenizer(
        list(texts), truncation=True, max_length=available, add_special_tokens=False, return_offsets_mapping=True
    )["offset_mapping"]
    ends = [offsets[-1][1] if offsets else 0 for offsets in truncated]
    return [prompt.replace(SENTENCE, text[:end]) for text, end in zip(texts, ends, strict=True)]


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
