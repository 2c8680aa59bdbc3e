"""Sizes in bytes, written as text with a unit."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(B|[KMGT]B|[KMGT]iB)")
_PREFIXES = "KMGT"


def parse_bytes(text: str) -> int:
    """Return a size such as `200GiB` (2³⁰ bytes each) or `1.5 TB` (10¹² each) in bytes.

    Raises:
        ValueError: The text is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size; write a number with its unit, such as 200GiB or 1.5TB")
    number, unit = float(found[1]), found[2]
    base = 1024 if unit.endswith("iB") else 1000
    return int(number * base ** (_PREFIXES.find(unit[0]) + 1))
