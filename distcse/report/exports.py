"""Scores for other programs: a CSV file with a line per score, and LaTeX tables for a paper."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from distcse.evaluation import Evaluation
from distcse.report.grids import Grid, grids
from distcse.storage import open_store

_COLUMNS = ("suite", "set", "measure", "model", "value", "base", "difference", "low", "high", "overlap")
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "τ": r"$\tau$",
    "×": r"$\times$",
    "‡": r"$\ddagger$",
    "†": r"$\dagger$",
}
_SPECIAL |= {sign: f"\\{sign}" for sign in "&%$#_{}"}
_SPECIAL |= {"→": r"$\rightarrow$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}


def write_exports(evaluation: Evaluation, folder: Path) -> None:
    """Write scores.csv and scores.tex into a folder."""
    store = open_store(folder)
    store.write_text("scores.csv", scores_csv(evaluation))
    store.write_text("scores.tex", scores_tex(evaluation))


def scores_csv(evaluation: Evaluation) -> str:
    """Format all scores, a line each: value, difference from the base model with its interval, and overlap with the text."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for score in evaluation.scores:
        for model, value in score.values.items():
            found = score.against(model, evaluation.base)
            compared = ("", "", "", "") if found is None else (evaluation.base, found.value, found.low, found.high)
            numbers = [f"{number:.6g}" if isinstance(number, float) else number for number in (value, *compared)]
            overlap = f"{evaluation.overlap_fraction(score, model):.4g}"
            writer.writerow([score.suite, score.set, score.measure, model, *numbers, overlap])
    return written.getvalue()


def scores_tex(evaluation: Evaluation) -> str:
    """Format the report's tables in LaTeX, for the package booktabs; the best score of a column is bold."""
    return "\n".join(["% Needs \\usepackage{booktabs}.", *(_table(grid) for grid in grids(evaluation))])


def _table(grid: Grid) -> str:
    measure = f" ({grid.measure})" if grid.measure else ""
    rows = []
    for model, cells in grid.rows.items():
        shown = [f"\\textbf{{{_escape(cell.text)}}}" if cell.best else _escape(cell.text) for cell in cells]
        marks = [_escape(cell.mark) for cell in cells]
        row = [_escape(model), *(text + mark for text, mark in zip(shown, marks, strict=True))]
        rows.append(" & ".join(row) + r" \\")
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            f"\\caption{{{_escape(grid.title + measure)}}}",
            f"\\begin{{tabular}}{{l{'r' * len(grid.columns)}}}",
            r"\toprule",
            " & ".join(["", *map(_escape, grid.columns)]) + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _escape(text: str) -> str:
    return "".join(_SPECIAL.get(sign, sign) for sign in text)
