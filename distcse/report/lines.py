"""Prints lines to copy, and JSON, on standard output. It imports no PyTorch, so that commands can print at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console


def print_lines(lines: list[str]) -> None:
    """Print lines on standard output without wrapping, so that they can be copied."""
    console = Console(file=sys.stdout)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_json(lines: Iterable[Mapping[str, Any]]) -> None:
    """Print one JSON object per line on standard output, for programs."""
    for line in lines:
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    sys.stdout.flush()
