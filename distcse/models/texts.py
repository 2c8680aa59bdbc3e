"""Check the texts that a caller passes to an encoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from distcse.errors import ArgumentError


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
