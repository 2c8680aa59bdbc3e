"""Assertions about the errors that distcse raises: the type, which has the code, and what the message names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from distcse.errors import DistcseError


@contextmanager
def fails_with(kind: type[DistcseError], *named: str) -> Iterator[pytest.ExceptionInfo[DistcseError]]:
    """Assert that the block raises an error of exactly this class, whose message names what the user needs.

    Unlike `pytest.raises`, a subclass of `kind` does not pass: the class determines the error's code, which is stable. The
    rest of the message is not compared, so that its wording can change.

    Args:
        kind: The specific class, such as `UnknownKeyError`.
        named: Strings that must occur in the message: keys, values, file names.

    Yields:
        pytest's `ExceptionInfo`; its `value` is the error once the block has ended.
    """
    with pytest.raises(kind) as raised:
        yield raised
    error = raised.value
    assert type(error) is kind, f"{type(error).__name__} ({error.code}), not {kind.__name__} ({kind.code}): {error}"
    missing = [text for text in named if text not in str(error)]
    assert not missing, f"{missing} not in the message of {kind.__name__}: {error}"
