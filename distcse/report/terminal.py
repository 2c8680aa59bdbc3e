"""Prints results on standard output as tables: evaluations, sweeps and comparisons of teachers."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distcse.evaluation import Choice, Evaluation
from distcse.report.grids import SPEED_COLUMNS, Grid, grids, legend, row_title, size_and_speed, spread_text
from distcse.report.verdict import explain, verdict
from distcse.runs.distillation.dev_ensemble import EnsembleScores
from distcse.teachers.comparison import NEAREST, TeacherComparison
from distcse.tuning.final_evaluation import SummaryRow

_PIPE_WIDTH = 1000


def evaluation_text(evaluation: Evaluation) -> str:
    """Return the tables of an evaluation as text, as `print_evaluation` prints them into a file."""
    text = io.StringIO()
    print_evaluation(
        evaluation, Console(file=text, markup=False, width=_PIPE_WIDTH, force_jupyter=False, force_terminal=False)
    )
    return "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines())


def print_evaluation(evaluation: Evaluation, console: Console | None = None) -> None:
    """Print the verdict of an evaluation and its tables: a row per model, with its difference from the base under it."""
    console, shown = console or _for_tables(), grids(evaluation)
    if lines := [*verdict(evaluation).values()]:
        console.print("\n".join(["", *lines, explain(evaluation)]), highlight=False, markup=False, soft_wrap=True)
    for grid in shown:
        console.print(f"\n{grid.title}{f' ({grid.measure})' if grid.measure else ''}", highlight=False, markup=False)
        console.print(_table(grid))
    if any(cell.difference for grid in shown for cells in grid.rows.values() for cell in cells):
        line = f"Under each row: difference from {evaluation.base} and its 95 % confidence interval (paired bootstrap)."
        console.print(f"\n{line} * marks intervals without 0.", markup=False, highlight=False, soft_wrap=True)
    for line in legend(evaluation):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    _print_models(console, evaluation)


def _print_models(console: Console, evaluation: Evaluation) -> None:
    """Print size and speed of the models whose speed was measured."""
    timed = [about for about in evaluation.models if about.sentences_per_s is not None]
    if not timed:
        return
    console.print(
        f"\nSize and speed ({evaluation.settings['device']}, {evaluation.settings['precision']})", highlight=False
    )
    console.print(_figures(SPEED_COLUMNS, {about.name: size_and_speed(about) for about in timed}))


def _for_tables() -> Console:
    console = Console(file=sys.stdout, markup=False)  # names of models and sets may contain brackets
    if not console.is_terminal:
        console.width = _PIPE_WIDTH  # do not wrap lines in files and pipes
    return console


def print_summary(rows: Sequence[SummaryRow]) -> None:
    """Print a sweep's final runs: mean and standard deviation over seeds."""
    if not rows:
        return
    models = list(dict.fromkeys(name for row in rows for name in row.spreads))
    table = _empty_table(("measure", *models), "set")
    for row in rows:
        cells = (spread_text(row.measure, row.spreads.get(name)) for name in models)
        table.add_row(row_title(row), row.measure, *cells)
    _for_tables().print(table)


def print_remarks(evaluation: Evaluation) -> None:
    """Print warnings and missing sets on standard error."""
    console = Console(stderr=True)
    for line in evaluation.warnings:
        console.print(f"warning   {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for line in evaluation.missing:
        console.print(f"missing   {line}", markup=False, highlight=False, soft_wrap=True)


def _table(grid: Grid) -> Table:
    table = _empty_table(grid.columns)
    for model, cells in grid.rows.items():
        table.add_row(model, *(Text(cell.text + cell.mark, style="bold" if cell.best else "") for cell in cells))
        if any(cell.difference for cell in cells):
            styles = ("" if cell.clear else "dim" for cell in cells)
            marked = (cell.difference + "*" * cell.clear for cell in cells)
            table.add_row("", *(Text(text, style) for text, style in zip(marked, styles, strict=True)))
    return table


def print_comparison(comparison: TeacherComparison) -> None:
    """Print how far teachers agree, and the sentence pairs on which they disagree most."""
    console = _for_tables()
    names = [f"teacher {number}" for number in range(len(comparison.teachers))]
    for number in comparison.compared:
        console.print(f"{names[number]}  {comparison.teachers[number]}", markup=False, highlight=False, soft_wrap=True)
    titles = ("width", "cosines", "effective rank", "sentences/s", "weight", "in effect")
    cards = {
        names[card.teacher]: (
            str(card.dimension),
            card.statistics.band,
            f"{card.statistics.effective_rank:.0f}",
            f"{card.sentences_per_s:.0f}",
            f"{card.weight:.0%}",
            f"{card.effective_weight:.0%}",
        )
        for card in comparison.cards
    }
    console.print(f"\nVectors of {comparison.sentences:,} sentences of the corpus", markup=False, highlight=False)
    console.print(_figures(titles, cards))
    console.print(f"\nAgreement on {comparison.sentences:,} sentences of the corpus", markup=False, highlight=False)
    pairings = {
        f"{names[pairing.first]} and {names[pairing.second]}": (f"{pairing.kendall:.1f}", f"{pairing.overlap:.1f}")
        for pairing in comparison.pairings
    }
    console.print(_figures(("Kendall's τ ×100", f"common in the {NEAREST} nearest, %"), pairings))
    console.print("\nWhere they disagree most (cosines in the teachers' order)", markup=False, highlight=False)
    for disagreement in comparison.disagreements:
        cosines = "  ".join(f"{cosine:5.2f}" for cosine in disagreement.cosines)
        console.print(f"{cosines}  {disagreement.one}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"{' ' * len(cosines)}  {disagreement.other}", markup=False, highlight=False, soft_wrap=True)


def print_ensemble_scores(scores: EnsembleScores) -> None:
    """Print the dev score of the teachers' ensemble, what it loses without each, and fitted weights as overrides."""
    console = _for_tables()
    rows = {
        f"teacher {number}": (f"{alone:.2f}", f"{-loss:+.2f}")
        for number, alone, loss in zip(scores.teachers, scores.alone, scores.losses_without, strict=True)
    }
    console.print(f"\n{scores.metric} of the mean of cosines, without a student", markup=False, highlight=False)
    console.print(_figures(("alone", "change without it"), rows))
    weightings = {
        weighting.name: (f"{weighting.score:.2f}", *(f"{alpha:.3g}" for alpha in weighting.alphas))
        for weighting in scores.weightings
    }
    console.print("\nAll of them together, by their weights", markup=False, highlight=False)
    console.print(_figures((scores.metric, *(f"alpha {number}" for number in scores.teachers)), weightings))
    fitted = scores.weightings[-1]
    if fitted.name == "fitted":
        alphas = zip(scores.teachers, fitted.alphas, strict=True)
        overrides = " ".join(f"teachers.encoders.{number}.alpha={alpha:.3g}" for number, alpha in alphas)
        console.print(f"\n{overrides}", markup=False, highlight=False, soft_wrap=True)


def _empty_table(titles: Sequence[str], first: str = "") -> Table:
    """Return a table without rows; all columns but the first are aligned to the right."""
    table = Table(show_edge=False, pad_edge=False, box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column(first)
    for title in titles:
        table.add_column(title, justify="right")
    return table


def _figures(titles: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    """Return a table of figures with named rows and columns."""
    table = _empty_table(titles)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def results_as_json(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return a `Score` event for every score of an evaluation, and a `Model` event for every model whose speed was measured."""
    scores = [
        {
            "event": "Score",
            "suite": s.suite,
            "set": s.set,
            "measure": s.measure,
            "average": s.average,
            "values": s.values,
            "overlap": evaluation.overlaps(s),
        }
        for s in evaluation.scores
    ]
    return scores + [
        {
            "event": "Model",
            "name": about.name,
            "parameters": about.parameters,
            "dimensions": about.dimensions,
            "size_bytes": about.size_bytes,
            "sentences_per_s": about.sentences_per_s,
            "latency_ms": about.latency_ms,
        }
        for about in evaluation.models
        if about.sentences_per_s is not None
    ]


def choice_as_json(choice: Choice) -> dict[str, Any]:
    """Return the best model under limits as a `Choice` event; its name is null if no model keeps them."""
    return {
        "event": "Choice",
        "max_ms": choice.limits.ms,
        "max_mb": choice.limits.mb,
        "suite": choice.score.suite,
        "set": choice.score.set,
        "measure": choice.score.measure,
        "name": None if choice.model is None else choice.model.name,
    }
