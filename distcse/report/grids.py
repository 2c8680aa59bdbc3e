"""An evaluation as tables, for the terminal, model cards and report pages, with the papers' published scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from statistics import mean

import yaml

from distcse.evaluation import Evaluation, ModelInfo, Score
from distcse.evaluation.contamination import NOTICED_FROM, TRANSDUCTIVE_FROM
from distcse.evaluation.results import Spread, compute_spreads, group_runs, has_repeated_runs, headlines
from distcse.evaluation.suites import PUBLISHED
from distcse.report.verdict import NOTICED, TRANSDUCTIVE, by_interest, mark_of, score_name
from distcse.tuning.final_evaluation import SummaryRow

SPEED_COLUMNS = ("parameters", "MB", "dimensions", "sentences/s", "one sentence")


def size_and_speed(about: ModelInfo) -> list[str]:
    """Return a model's cells under `SPEED_COLUMNS`; `–` for what is not known."""
    return [
        f"{about.parameters / 1e6:.1f} M" if about.parameters else "–",
        f"{about.size_bytes / 1e6:.1f}" if about.size_bytes else "–",
        str(about.dimensions or "–"),
        "–" if about.sentences_per_s is None else f"{about.sentences_per_s:,.0f}",
        "–" if about.latency_ms is None else f"{about.latency_ms:.1f} ms",
    ]


TITLES = {
    "sts": "STS",
    "transfer": "Transfer",
    "pairs": "Pairs",
    "triplets": "Triplets",
    "ranking": "Ranking",
    "geometry": "Geometry",
    "retrieval": "Retrieval",
    "agreement": "Agreement",
    "dev": "Dev score",
    "texts": "Agreement on texts",
}
MEASURES = {
    "all": "Spearman ×100, all subsets at once",
    "mean": "Spearman ×100, mean over subsets",
    "wmean": "Spearman ×100, weighted mean over subsets",
    "accuracy": "accuracy %",
    "auc": "AUC ×100",
    "kcc": "Kendall's τ-b ×100",
    "ndcg": "NDCG ×100",
    "agreement": "Spearman ×100 with the teachers' lists",
    "overlap@10": "% of the teachers' ten nearest documents",
    "ndcg@10": "nDCG@10 ×100, gains: the teachers' cosines",
}
_TABLE_PER_MEASURE = ("sts", "transfer", "pairs", "triplets", "ranking", "agreement", "dev")
_UNITS_OF_ONE = ("alignment", "uniformity")
LOWER_IS_BETTER = ("alignment", "uniformity", "bytes")


@dataclass(frozen=True)
class Cell:
    """A score with its mark and its difference from the base model."""

    text: str
    mark: str = ""
    difference: str = ""
    """`+1.23 [0.98, 1.45]`: difference from the base and its 95 % confidence interval; empty for the base."""
    clear: bool = False
    """Whether the interval excludes 0."""
    best: bool = False
    """Whether it is the best of its column."""


@dataclass(frozen=True)
class Grid:
    """A table with a row per model and a column per set or measure."""

    suite: str
    title: str
    measure: str
    """The measure of all columns; empty if each column has its own."""
    columns: Sequence[str]
    rows: dict[str, list[Cell]]
    measure_key: str = ""
    set: str = ""


def overview(evaluation: Evaluation) -> Grid:
    """Return a table of each model's headline scores, size and speed, students first."""
    scores, settings = headlines(evaluation.scores), evaluation.settings
    rows = {
        about.name: [*(_cell(evaluation, score, about.name) for score in scores), *map(Cell, size_and_speed(about))]
        for about in by_interest(evaluation)
    }
    measured = f"Speed on {settings['device']} in {settings['precision']}" if "precision" in settings else ""
    return Grid("", "Quality, size and speed", measured, [*map(score_name, scores), *SPEED_COLUMNS], rows)


def grids(evaluation: Evaluation) -> list[Grid]:
    """Return the tables of an evaluation in the order of its suites, each followed by means over runs if there are several."""
    found: list[Grid] = []
    for suite in dict.fromkeys(score.suite for score in evaluation.scores):
        suite_scores = [score for score in evaluation.scores if score.suite == suite]
        title = TITLES.get(suite, suite)
        if suite in _TABLE_PER_MEASURE:
            for measure in _shown(suite, [score.measure for score in suite_scores]):
                chosen = [score for score in suite_scores if score.measure == measure]
                sets = [score.set for score in chosen]
                found += _with_means(evaluation, chosen, Grid(suite, title, MEASURES[measure], sets, {}, measure))
        else:
            for name in dict.fromkeys(score.set for score in suite_scores):
                chosen = [score for score in suite_scores if score.set == name]
                measures = [score.measure for score in chosen]
                found += _with_means(evaluation, chosen, Grid(suite, f"{title}, {name}", "", measures, {}, set=name))
    return found


def _with_means(evaluation: Evaluation, scores: Sequence[Score], empty: Grid) -> Iterator[Grid]:
    yield replace(empty, rows=_rows(evaluation, scores))
    if not has_repeated_runs(evaluation):
        return
    runs = group_runs(about.name for about in evaluation.models)
    named = {name for score in scores for name in compute_spreads(score)}
    means = {name: [_mean(evaluation, score, name, runs[name]) for score in scores] for name in runs if name in named}
    yield replace(empty, title=f"{empty.title}, mean ± standard deviation over runs", rows=means)


def _shown(suite: str, measures: list[str]) -> list[str]:
    """Return the measures to show: of scored pairs only the chosen aggregate, which is first."""
    different = list(dict.fromkeys(measures))
    return different[:1] if suite in ("sts", "dev") else different


def legend(evaluation: Evaluation) -> list[str]:
    """Return the meaning of the marks in an evaluation, a line for all models with the same overlap with a set."""
    models: dict[tuple[str, float], list[str]] = {}
    for about in evaluation.models:
        for entry, share in about.contamination.items():
            if share >= NOTICED_FROM:
                models.setdefault((entry.replace("/", " ", 1), share), []).append(about.name)
    lines = []
    if any(score.suite == "texts" for score in evaluation.scores):
        lines.append(
            "pearson, spearman: correlations ×100 of the cosines of random pairs; kept@k: % of a text's k nearest neighbors "
            "that both models share"
        )
    for (name, share), of in models.items():
        line = f"{', '.join(of)}, {name}:"
        if share >= TRANSDUCTIVE_FROM:
            line = f"{TRANSDUCTIVE} {line} transductive, {100 * share:.0f} %"
        else:
            line = f"{NOTICED} {line} {100 * share:.1f} %"
        lines.append(f"{line} of the set's sentences were in the training text")
    return lines


def number(measure: str, value: float) -> str:
    """Format a score as tables show it."""
    if measure == "bytes":
        return f"{value:,.0f}"
    return f"{value:.3f}" if measure in _UNITS_OF_ONE else f"{value:.2f}"


def spread_text(measure: str, spread: Spread | None) -> str:
    """Format mean ± standard deviation as tables show them; a single run's score, or an empty text for None."""
    if spread is None:
        return ""
    return number(measure, spread.mean) + (f" ± {number(measure, spread.deviation)}" if spread.number > 1 else "")


def _rows(evaluation: Evaluation, scores: Sequence[Score]) -> dict[str, list[Cell]]:
    names = [about.name for about in evaluation.models if any(about.name in score.values for score in scores)]
    return {name: [_cell(evaluation, score, name) for score in scores] for name in names}


def _cell(evaluation: Evaluation, score: Score, model: str) -> Cell:
    if model not in score.values:
        return Cell("–")
    value = score.values[model]
    best = min(score.values.values()) if score.measure in LOWER_IS_BETTER else max(score.values.values())
    comparison = score.against(model, evaluation.base)
    difference = ""
    if comparison is not None:
        low, high = number(score.measure, comparison.low), number(score.measure, comparison.high)
        difference = f"{'+' if comparison.value >= 0 else ''}{number(score.measure, comparison.value)} [{low}, {high}]"
    return Cell(
        number(score.measure, value),
        mark_of(evaluation.overlap_fraction(score, model)),
        difference,
        comparison is not None and comparison.is_significant,
        best=len(score.values) > 1 and value == best,
    )


def _mean(evaluation: Evaluation, score: Score, name: str, runs: Sequence[str]) -> Cell:
    spread = compute_spreads(score).get(name)
    seen = max(evaluation.overlap_fraction(score, run) for run in runs)
    return Cell(spread_text(score.measure, spread) or "–", mark_of(seen) if spread else "")


def row_title(row: SummaryRow) -> str:
    """Return a sweep row's title: suite, set and mark."""
    return f"{TITLES.get(row.suite, row.suite)}: {row.set} {mark_of(row.seen)}".strip()


def markdown_table(grid: Grid, differences: bool = False) -> list[str]:
    """Return the lines of a table in Markdown, with the differences from the base under each score if requested."""
    lines = [f"| | {' | '.join(grid.columns)} |", f"|---{'|---:' * len(grid.columns)}|"]
    for model, cells in grid.rows.items():
        shown = [f"**{cell.text}**{cell.mark}" if cell.best else cell.text + cell.mark for cell in cells]
        if differences:
            shown = [
                f"{text}<br>{cell.difference}" if cell.difference else text
                for text, cell in zip(shown, cells, strict=True)
            ]
        lines.append(f"| {model} | {' | '.join(shown)} |")
    return lines


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
            cells = [_published_cell(row, column, grid) for column in grid.columns]
            if any(cell != "–" for cell in cells):
                found.append((row, cells))
    return found


def _published_cell(row: PublishedRow, column: str, grid: Grid) -> str:
    if column in row.values:
        return number(column, row.values[column])
    if not column.startswith("average"):
        return "–"
    sets = [known.name for known in PUBLISHED[row.suite] if known.name in grid.columns]
    known = [row.values[name] for name in sets if name in row.values]
    return f"{mean(known):.2f}" if len(known) == len(sets) else "–"
