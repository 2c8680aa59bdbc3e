"""Check the texts that a caller passes to an encoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from pathlib import PurePath
from typing import Any

import numpy as np

from distcse.errors import TextInputError

_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, set, frozenset)
"""Types that can be iterated over and are no list: single values, and unordered collections."""


def as_texts(texts: Iterable[str]) -> list[str]:
    """Return texts as a list.

    Args:
        texts: A list, tuple, NumPy array, pandas Series, pyarrow array or generator of texts.

    Raises:
        TextInputError: They are something else, or one of them is not a text, or has half of a surrogate pair; names its place.
    """
    columns = getattr(texts, "column_names", getattr(texts, "columns", None))  # pyarrow's `columns` are their values
    if columns is not None and not callable(columns):
        names = ", ".join(map(str, columns))
        raise TextInputError(f"expected texts, found a table with the columns {names:.100}; pass one of its columns")
    if isinstance(texts, _NO_LISTS) or not _is_iterable(texts):
        raise TextInputError(f"expected a text or a list of texts, found {type(texts).__name__}; pass a list of texts")
    as_python = getattr(texts, "to_pylist", None)  # pyarrow's values are no str
    found: list[Any] = list(texts if as_python is None else as_python())
    for place, text in enumerate(found):
        if not isinstance(text, str):
            raise TextInputError(
                f"texts[{place}] is {text!r:.60} ({type(text).__name__}), not a text; {_way_out(text)}"
            )
        _refuse_half_character(text, f"texts[{place}]")
    return found


def as_pairs(pairs: Iterable[Sequence[str]]) -> list[tuple[str, str]]:
    """Return pairs of texts as a list.

    Args:
        pairs: A list, tuple, NumPy array or generator of pairs.

    Raises:
        TextInputError: They are something else, or one of them is not two texts; names its place.
    """
    if isinstance(pairs, _NO_LISTS) or not _is_iterable(pairs):
        raise TextInputError(f"expected a list of pairs, found {type(pairs).__name__}; write [(first, second)]")
    found: list[tuple[str, str]] = []
    for place, pair in enumerate(pairs):
        if isinstance(pair, str) or not isinstance(pair, Sequence | np.ndarray) or len(pair) != 2:
            raise TextInputError(
                f"pairs[{place}] is {pair!r:.60} ({type(pair).__name__}), not two texts; write [(first, second)]"
            )
        first, second = pair
        if not isinstance(first, str) or not isinstance(second, str):
            raise TextInputError(
                f"pairs[{place}] is {pair!r:.60}, not two texts; remove it, or convert them with str()"
            )
        for text in (first, second):
            _refuse_half_character(text, f"pairs[{place}]")
        found.append((first, second))
    return found


def _way_out(value: Any) -> str:
    """Return what to do with a value that is no text; `str` of a missing value or of bytes would not be the text."""
    if isinstance(value, bytes | bytearray):
        return "decode it: .decode()"
    is_number = isinstance(value, Real | Decimal) and value == value
    return "remove it, or convert it with str()" if is_number or isinstance(value, PurePath) else "remove it"


def _is_iterable(values: Any) -> bool:
    """Return whether a value can be iterated over; an array without dimensions only looks as if it could."""
    return isinstance(values, Iterable) and getattr(values, "ndim", 1) != 0


def _refuse_half_character(text: str, place: str) -> None:
    """Refuse half of a surrogate pair, which JSON can contain and a tokenizer cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextInputError(
            f"{place} has {text[error.start]!a}, half of a surrogate pair and no character; remove it"
        ) from None
