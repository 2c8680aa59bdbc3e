"""An evaluation as tables: what terminal, model card and report all show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from distcse.evaluation import Evaluation, Score
from distcse.evaluation.contamination import NOTICED_FROM, TRANSDUCTIVE_FROM
from distcse.evaluation.runs import Spread, has_several, joined, spreads
from distcse.tuning.summary import Row

TITLES = {
    "sts": "STS",
    "transfer": "Transfer",
    "pairs": "Pairs",
    "ranking": "Ranking",
    "geometry": "Geometry",
    "retrieval": "Retrieval",
    "agreement": "Agreement",
    "dev": "Dev score",
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
}
_ONE_TABLE_A_MEASURE = ("sts", "transfer", "pairs", "ranking", "agreement")
_UNITS_OF_ONE = ("alignment", "uniformity")
LOWER_IS_BETTER = ("alignment", "uniformity")
TRANSDUCTIVE = "‡"
NOTICED = "†"


@dataclass(frozen=True)
class Cell:
    """One figure, with its mark and how it compares with the base's."""

    text: str
    mark: str = ""
    difference: str = ""
    """`+1.23 [0.98, 1.45]`: the difference from the base and its 95 % interval; empty for the base."""
    clear: bool = False
    best: bool = False


@dataclass(frozen=True)
class Grid:
    """A table: one row a model, one column a set or a measure."""

    suite: str
    title: str
    measure: str
    """What all columns measure; empty where each has a measure of its own."""
    columns: Sequence[str]
    rows: dict[str, list[Cell]]
    measure_key: str = ""
    set: str = ""


def grids(evaluation: Evaluation) -> list[Grid]:
    """The tables of an evaluation, in the order of its suites; each is followed by the means where something has several runs."""
    found: list[Grid] = []
    for suite in dict.fromkeys(score.suite for score in evaluation.scores):
        mine = [score for score in evaluation.scores if score.suite == suite]
        title = TITLES.get(suite, suite)
        if suite in _ONE_TABLE_A_MEASURE:
            for measure in _shown(suite, [score.measure for score in mine]):
                chosen = [score for score in mine if score.measure == measure]
                sets = [score.set for score in chosen]
                found += _with_means(evaluation, chosen, Grid(suite, title, MEASURES[measure], sets, {}, measure))
        else:
            for name in dict.fromkeys(score.set for score in mine):
                chosen = [score for score in mine if score.set == name]
                measures = [score.measure for score in chosen]
                found += _with_means(evaluation, chosen, Grid(suite, f"{title}, {name}", "", measures, {}, set=name))
    return found


def _with_means(evaluation: Evaluation, scores: Sequence[Score], empty: Grid) -> Iterator[Grid]:
    yield replace(empty, rows=_rows(evaluation, scores))
    if not has_several(evaluation):
        return
    runs = joined(about.name for about in evaluation.models)
    means = {name: [_mean(evaluation, score, name, runs[name]) for score in scores] for name in runs}
    yield replace(empty, title=f"{empty.title}, mean ± standard deviation over runs", rows=means)


def _shown(suite: str, measures: list[str]) -> list[str]:
    """Of STS the chosen aggregate alone, which stands first; of other suites all."""
    different = list(dict.fromkeys(measures))
    return different[:1] if suite == "sts" else different


def legend(evaluation: Evaluation) -> list[str]:
    """What the marks mean, for those that are there: a line for models that saw the same share of a set."""
    models: dict[tuple[str, float], list[str]] = {}
    for about in evaluation.models:
        for entry, share in about.contamination.items():
            if share >= NOTICED_FROM:
                models.setdefault((entry.replace("/", " ", 1), share), []).append(about.name)
    lines = []
    for (name, share), of in models.items():
        told = f"{', '.join(of)}, {name}:"
        if share >= TRANSDUCTIVE_FROM:
            told = f"{TRANSDUCTIVE} {told} transductive, {100 * share:.0f} %"
        else:
            told = f"{NOTICED} {told} {100 * share:.1f} %"
        lines.append(f"{told} of the set's sentences were in the training text")
    return lines


def number(measure: str, value: float) -> str:
    """A figure as tables print it."""
    return f"{value:.3f}" if measure in _UNITS_OF_ONE else f"{value:.2f}"


def spread_text(measure: str, spread: Spread | None) -> str:
    """Mean ± standard deviation as tables print them, of one run its figure; nothing where there is none."""
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
    apart = score.against(model, evaluation.base)
    told = ""
    if apart is not None:
        low, high = number(score.measure, apart.low), number(score.measure, apart.high)
        told = f"{'+' if apart.value >= 0 else ''}{number(score.measure, apart.value)} [{low}, {high}]"
    return Cell(
        number(score.measure, value),
        _mark_of(evaluation.overlap_fraction(score, model)),
        told,
        apart is not None and apart.clear,
        best=len(score.values) > 1 and value == best,
    )


def _mean(evaluation: Evaluation, score: Score, name: str, runs: Sequence[str]) -> Cell:
    spread = spreads(score).get(name)
    seen = max(evaluation.overlap_fraction(score, run) for run in runs)
    return Cell(spread_text(score.measure, spread) or "–", _mark_of(seen) if spread else "")


def row_title(row: Row) -> str:
    """A sweep's row by suite and set, with its mark."""
    return f"{TITLES.get(row.suite, row.suite)}: {row.set} {_mark_of(row.seen)}".strip()


def _mark_of(share: float) -> str:
    """The mark of a figure on a set of which this share was in the training text."""
    return TRANSDUCTIVE if share >= TRANSDUCTIVE_FROM else NOTICED if share >= NOTICED_FROM else ""


def markdown_table(grid: Grid, differences: bool = False) -> list[str]:
    """The lines of a grid in Markdown; with differences, each figure's comparison with the base under it."""
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
