"""Short forms of recipe paths and their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def shorten_path(path: str) -> str:
    """Return the last parts of a recipe path: `rank.tau2`, `encoders.0.alpha`, `lr`."""
    parts = path.split(".")
    last_parts = parts[-3:] if len(parts) > 2 and parts[-2].isdigit() else parts[-2:]
    return ".".join(last_parts).removeprefix("training.").removeprefix("objective.")


def format_value(value: Any) -> str:
    """Format a value; floats with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_values(values: Mapping[str, Any]) -> str:
    """Format values by their short paths, in one line."""
    return "  ".join(f"{shorten_path(path)}={format_value(value)}" for path, value in values.items())
