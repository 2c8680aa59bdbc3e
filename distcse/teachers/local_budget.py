"""Which tables a node may copy from object storage, or map from a folder, and which are read row by row where they are stored."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.events import LogMessage, Reporter
from distcse.teachers.table import EmbeddingTable

_GIB = 2**30


def apply_local_budget(tables: Sequence[EmbeddingTable | None], budget_bytes: int | None, reporter: Reporter) -> None:
    """Let the tables that do not fit the budget be read in place, and report how each table is read.

    Tables take the budget in the recipe's order; one that does not fit leaves the rest of it to later ones.

    Args:
        tables: Complete tables; None for a live teacher.
        budget_bytes: Bytes of tables on each node; None for no limit.
        reporter: Receives the line, if there is a budget or a table in object storage.
    """
    lines, remaining = [], budget_bytes
    for number, table in enumerate(tables):
        if table is None or (budget_bytes is None and not table.store.is_remote):
            continue
        size = table.stored_bytes
        fits = remaining is None or size <= remaining
        table.reads_in_place = not fits
        if remaining is not None and fits:
            remaining -= size
        copied = "is copied to each node that reads it" if table.store.is_remote else "is memory-mapped"
        way = copied if fits else "is read row by row where it is stored, ahead of the step"
        lines.append(f"teacher {number} ({size / _GIB:.3g} GiB) {way}")
    if lines:
        reporter.emit(LogMessage(f"storage.local_budget {_describe(budget_bytes)}: {'; '.join(lines)}"))


def _describe(budget_bytes: int | None) -> str:
    return "is not set" if budget_bytes is None else f"is {budget_bytes / _GIB:.3g} GiB a node"
