"""Knobs and their values where there is little room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def short(path: str) -> str:
    """A recipe path by its last parts: `rank.tau2`, `encoders.0.alpha`, `lr`."""
    parts = path.split(".")
    kept = parts[-3:] if len(parts) > 2 and parts[-2].isdigit() else parts[-2:]
    return ".".join(kept).removeprefix("training.").removeprefix("objective.")


def shown(value: Any) -> str:
    """A value to four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def in_a_line(values: Mapping[str, Any]) -> str:
    """All values, by short path."""
    return "  ".join(f"{short(path)}={shown(value)}" for path, value in values.items())
