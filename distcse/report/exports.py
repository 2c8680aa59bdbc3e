"""Scores for other programs: a CSV file with a line per score, and LaTeX tables for a paper."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from distcse.evaluation import Evaluation
from distcse.report.grids import Grid, grids, legend, row_title, spread_text
from distcse.storage import ArtifactStore, open_store
from distcse.tuning.final_evaluation import SummaryRow

_NEEDS = r"% Needs \usepackage{booktabs}."
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


def write_exports(evaluation: Evaluation, folder: Path | ArtifactStore) -> None:
    """Write scores.csv and scores.tex into a folder."""
    store = open_store(folder)
    store.write_text("scores.csv", scores_csv(evaluation))
    store.write_text("scores.tex", scores_tex(evaluation))


def scores_csv(evaluation: Evaluation) -> str:
    """Format all scores, a line each: value, difference from the base model with its interval, and overlap with the text."""
    rows: list[Sequence[object]] = []
    for score in evaluation.scores:
        for model, value in score.values.items():
            found = score.against(model, evaluation.base)
            compared = ("", "", "", "") if found is None else (evaluation.base, found.value, found.low, found.high)
            numbers = [f"{number:.6g}" if isinstance(number, float) else number for number in (value, *compared)]
            overlap = f"{evaluation.overlap_fraction(score, model):.4g}"
            rows.append([score.suite, score.set, score.measure, model, *numbers, overlap])
    return _csv(_COLUMNS, rows)


def scores_tex(evaluation: Evaluation) -> str:
    """Format the report's tables in LaTeX, for booktabs; the best score of a column is bold. Comments explain the marks."""
    return "\n".join([_NEEDS, *(f"% {_escape(line)}" for line in legend(evaluation)), *map(_table, grids(evaluation))])


def write_summary(rows: Sequence[SummaryRow], folder: Path | ArtifactStore) -> None:
    """Write a sweep's final runs, averaged over seeds, as summary.csv and summary.tex into a folder."""
    store = open_store(folder)
    store.write_text("summary.csv", summary_csv(rows))
    store.write_text("summary.tex", summary_tex(rows))


def summary_csv(rows: Sequence[SummaryRow]) -> str:
    """Format a line per score and model: mean, sample standard deviation (empty for one run), number of runs, and overlap."""
    lines: list[Sequence[object]] = []
    for row in rows:
        for model, spread in row.spreads.items():
            deviation = f"{spread.deviation:.6g}" if spread.number > 1 else ""
            numbers = (f"{spread.mean:.6g}", deviation, spread.number, f"{row.seen:.4g}")
            lines.append([row.suite, row.set, row.measure, model, *numbers])
    return _csv(("suite", "set", "measure", "model", "mean", "deviation", "runs", "overlap"), lines)


def summary_tex(rows: Sequence[SummaryRow]) -> str:
    """Format a table in LaTeX with a row per score and a column per model, for the package booktabs."""
    models = list(dict.fromkeys(name for row in rows for name in row.spreads))
    lines = [
        [_escape(row_title(row)), *(_escape(spread_text(row.measure, row.spreads.get(name))) for name in models)]
        for row in rows
    ]
    return f"{_NEEDS}\n{_tabular('Final runs: mean and standard deviation over seeds', models, lines)}"


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([header, *rows])
    return written.getvalue()


def _table(grid: Grid) -> str:
    measure = f" ({grid.measure})" if grid.measure else ""
    rows = []
    for model, cells in grid.rows.items():
        shown = [f"\\textbf{{{_escape(cell.text)}}}" if cell.best else _escape(cell.text) for cell in cells]
        marks = [_escape(cell.mark) for cell in cells]
        rows.append([_escape(model), *(text + mark for text, mark in zip(shown, marks, strict=True))])
    return _tabular(grid.title + measure, grid.columns, rows)


def _tabular(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the cells of its rows are LaTeX, the caption and the columns' names are not."""
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            f"\\caption{{{_escape(caption)}}}",
            f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
            r"\toprule",
            " & ".join(["", *map(_escape, columns)]) + r" \\",
            r"\midrule",
            *(" & ".join(row) + r" \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _escape(text: str) -> str:
    return "".join(_SPECIAL.get(sign, sign) for sign in text)
