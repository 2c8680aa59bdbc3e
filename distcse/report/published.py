"""Rows of the papers' tables, to stand beside ours and never to be taken for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import mean

import yaml

from distcse.evaluation.catalogue import PUBLISHED
from distcse.report.grids import Grid, number


@dataclass(frozen=True)
class PublishedRow:
    """One row of one paper's table."""

    suite: str
    model: str
    source: str
    values: dict[str, float]
    measure: str = ""
    """Of tables whose columns are sets."""
    set: str = ""
    """Of tables whose columns are measures."""


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """All of them, in the order of the file."""
    text = (files("distcse.report") / "published.yaml").read_text(encoding="utf-8")
    return tuple(PublishedRow(**row) for row in yaml.safe_load(text))


def beside(grid: Grid) -> list[tuple[PublishedRow, list[str]]]:
    """Published rows that share a column with a grid, and their cells in its columns.

    The average is over the same sets as ours: where some are missing, the mean of the paper's figures for the others.
    """
    found = []
    for row in published_rows():
        if (row.suite, row.measure, row.set) == (grid.suite, grid.measure_key, grid.set):
            cells = [_cell(row, column, grid) for column in grid.columns]
            if any(cell != "–" for cell in cells):
                found.append((row, cells))
    return found


def _cell(row: PublishedRow, column: str, grid: Grid) -> str:
    if column in row.values:
        return number(column, row.values[column])
    if not column.startswith("average"):
        return "–"
    sets = [known.name for known in PUBLISHED[row.suite] if known.name in grid.columns]
    known = [row.values[name] for name in sets if name in row.values]
    return f"{mean(known):.2f}" if len(known) == len(sets) else "–"
