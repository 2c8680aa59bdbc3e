"""What a model does with texts before its forward pass: checks them, and puts them into its prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from distcse.errors import ArgumentError, EncoderSettingError
from distcse.text.token_table import Reading, encode_batch, tokenizing

SENTENCE = "{sentence}"
"""Place of the text in a prompt that is a template (PromptBERT, Jiang et al. 2022); without it, a prompt is a prefix."""
TOKENIZED_TEXTS = 8192
"""Texts per call of a tokenizer, whose output of 30 tokens takes 4 KB until the call's ids are taken from it."""


def as_texts(texts: Iterable[str]) -> list[str]:
    """Return texts as a list."""
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
    """Return pairs of texts as a list."""
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
    """Insert each text into the prompt. A template truncates long texts, so that the words after them remain."""
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


def token_ids(tokenizer: Any, texts: Sequence[str], reading: Reading) -> list[list[int]]:
    """Tokenize texts with a prompt, truncated to a maximum length."""
    ids: list[list[int]] = []
    for begin in range(0, len(texts), TOKENIZED_TEXTS):
        part = apply_prompt(tokenizer, texts[begin : begin + TOKENIZED_TEXTS], reading.prompt, reading.max_length)
        with tokenizing(tokenizer, reading.max_length) as backend:
            ids += encode_batch(backend, part)
    return ids
