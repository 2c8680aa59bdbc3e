"""Published scores of the papers, which reports show next to measured ones and mark as published."""

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
    """A row of a paper's table."""

    suite: str
    model: str
    source: str
    values: dict[str, float]
    measure: str = ""
    """The measure, if the columns are sets."""
    set: str = ""
    """The set, if the columns are measures."""


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """Return all published rows, in the order of published.yaml."""
    text = (files("distcse.report") / "published.yaml").read_text(encoding="utf-8")
    return tuple(PublishedRow(**row) for row in yaml.safe_load(text))


def find_published(grid: Grid) -> list[tuple[PublishedRow, list[str]]]:
    """Return the published rows that share a column with a grid, and their cells in its columns.

    An average is over the sets of the grid: it is computed from the paper's scores if the paper averages over other sets.
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
