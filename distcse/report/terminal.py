"""What is told at the end, on standard output: tables of an evaluation, a sweep or a comparison, and lines to copy."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distcse.evaluation import Evaluation
from distcse.report.grids import Grid, grids, legend, row_title, spread_text
from distcse.teachers.comparison import NEAREST, TeacherComparison
from distcse.tuning.summary import Row

_PIPE_WIDTH = 1000


def print_evaluation(evaluation: Evaluation) -> None:
    """The tables on standard output: a row a model, under it how it compares with the base."""
    console = _for_tables()
    for grid in grids(evaluation):
        console.print(f"\n{grid.title}{f' ({grid.measure})' if grid.measure else ''}", highlight=False, markup=False)
        console.print(_table(grid))
    if evaluation.scores and len(evaluation.models) > 1:
        line = f"Under each row: difference from {evaluation.base}, and the 95 % interval of the paired bootstrap."
        console.print(f"\n{line} Clear ones are marked *.", markup=False, highlight=False, soft_wrap=True)
    for line in legend(evaluation):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _for_tables() -> Console:
    console = Console(file=sys.stdout, markup=False)  # names of models and sets may have brackets in them
    if not console.is_terminal:
        console.width = _PIPE_WIDTH  # a file has no edge to fold lines at
    return console


def print_summary(rows: Sequence[Row]) -> None:
    """The runs at a sweep's end on standard output: mean and standard deviation over their seeds."""
    if not rows:
        return
    table = Table(show_edge=False, pad_edge=False, box=SIMPLE_HEAD, collapse_padding=True)
    models = list(dict.fromkeys(name for row in rows for name in row.spreads))
    for name in ("set", "measure", *models):
        table.add_column(name, justify="left" if name in ("set", "measure") else "right")
    for row in rows:
        cells = (spread_text(row.measure, row.spreads.get(name)) for name in models)
        table.add_row(row_title(row), row.measure, *cells)
    _for_tables().print(table)


def print_remarks(evaluation: Evaluation) -> None:
    """What was missing and what was odd, on standard error."""
    console = Console(stderr=True)
    for line in evaluation.warnings:
        console.print(f"warning   {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for line in evaluation.missing:
        console.print(f"missing   {line}", markup=False, highlight=False, soft_wrap=True)


def _table(grid: Grid) -> Table:
    table = Table(show_edge=False, pad_edge=False, box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("")
    for name in grid.columns:
        table.add_column(name, justify="right")
    for model, cells in grid.rows.items():
        table.add_row(model, *(Text(cell.text + cell.mark, style="bold" if cell.best else "") for cell in cells))
        if any(cell.difference for cell in cells):
            styles = ("" if cell.clear else "dim" for cell in cells)
            marked = (cell.difference + "*" * cell.clear for cell in cells)
            table.add_row("", *(Text(text, style) for text, style in zip(marked, styles, strict=True)))
    return table


def print_lines(lines: list[str]) -> None:
    """Plain lines on standard output, never wrapped: they are to be copied."""
    console = Console(file=sys.stdout)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_comparison(comparison: TeacherComparison) -> None:
    """How far teachers agree, on standard output."""
    console = _for_tables()
    names = [f"teacher {number}" for number in range(len(comparison.teachers))]
    for number in comparison.compared:
        console.print(f"{names[number]}  {comparison.teachers[number]}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nAgreement on {comparison.sentences:,} sentences of the corpus", markup=False, highlight=False)
    table = Table(show_edge=False, pad_edge=False, box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("")
    for title in ("Kendall's τ ×100", f"common in the {NEAREST} nearest, %"):
        table.add_column(title, justify="right")
    for pairing in comparison.pairings:
        both = f"{names[pairing.first]} and {names[pairing.second]}"
        table.add_row(both, f"{pairing.kendall:.1f}", f"{pairing.overlap:.1f}")
    console.print(table)
    console.print("\nWhere they are farthest apart (cosines in the teachers' order)", markup=False, highlight=False)
    for dispute in comparison.disputes:
        cosines = "  ".join(f"{cosine:5.2f}" for cosine in dispute.cosines)
        console.print(f"{cosines}  {dispute.one}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"{' ' * len(cosines)}  {dispute.other}", markup=False, highlight=False, soft_wrap=True)


def print_json(lines: Iterable[Mapping[str, Any]]) -> None:
    """For programs: an object a line on standard output."""
    for line in lines:
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def scores_as_json(evaluation: Evaluation) -> list[dict[str, Any]]:
    """A line a score, with the events of a run: what is in its tables."""
    return [
        {
            "event": "Score",
            "suite": s.suite,
            "set": s.set,
            "measure": s.measure,
            "average": s.average,
            "values": s.values,
        }
        for s in evaluation.scores
    ]
