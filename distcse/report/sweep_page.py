"""Writes a sweep's report: a self-contained HTML page with charts, and the same as Markdown."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from distcse import __version__
from distcse.recipe import recipe_yaml
from distcse.report.canvas import COLORS, HEIGHT, INK, MUTED, Picture, legend_above, svg
from distcse.report.exports import write_exports, write_summary
from distcse.report.grids import legend, number, row_title, spread_text
from distcse.report.page import environment, write_page_files
from distcse.report.progress import format_value, shorten_path
from distcse.tuning.final_evaluation import SummaryRow, dev_row, set_rows, variant_of
from distcse.tuning.records import Trial, find_best_trial
from distcse.tuning.space import Space
from distcse.tuning.sweep import SweepResult


def write_sweep_pages(result: SweepResult) -> list[Path]:
    """Write the pages, and the final runs' scores as CSV and LaTeX, into the sweep's folder; return the pages."""
    space = Space(result.sweep, result.recipe)
    content = _content(result, space)
    drawn = sweep_pictures(result.trials, content["importances"])
    page = environment(escape=True).get_template("sweep.html").render(**content, pictures=drawn)
    text = environment(escape=False).get_template("sweep.md").render(**content).strip() + "\n"
    if result.evaluation is not None:
        write_exports(result.evaluation, result.store)
    if rows := rows_of(result):
        write_summary(rows, result.store)
    return write_page_files(result.store, page, text)


def rows_of(result: SweepResult) -> list[SummaryRow]:
    """Summarize the final runs: the dev score first, then the test sets."""
    dev = dev_row(result.final_results)
    return [*([dev] if dev else []), *(set_rows(result.evaluation) if result.evaluation else [])]


def unfinished(result: SweepResult) -> list[str]:
    """Return what the means leave out: final runs that did not finish, with the reason, and what was not measured."""
    runs = [
        f"{variant_of(run)}, seed {run.values['seed']}: {run.status}{f', {run.reason}' if run.reason else ''}"
        for run in result.final_results
        if run.status != "finished"
    ]
    return [*runs, *(result.evaluation.missing if result.evaluation else [])]


def _content(result: SweepResult, space: Space) -> dict[str, Any]:
    ranked = sorted(
        result.trials, key=lambda t: (t.status in ("diverged", "failed"), -(t.best.score if t.best else -1e9))
    )
    paths = list(space.parameters)
    rows = rows_of(result)
    models = list(dict.fromkeys(name for row in rows for name in row.spreads))
    return {
        "title": result.directory.name,
        "subtitle": _subtitle(result),
        "tiles": summary_tiles(result, rows),
        "interrupted": result.interrupted,
        "best_trial": result.best_trial,
        "best_values": {path: format_value(result.best_trial.values[path]) for path in paths}
        if result.best_trial
        else {},
        "models": models,
        "summary": [
            {
                "name": row_title(row),
                "measure": row.measure,
                "cells": [spread_text(row.measure, row.spreads.get(name)) for name in models],
            }
            for row in rows
        ],
        "tested": result.evaluation is not None,
        "seeds": len(result.sweep.final_runs.seeds),
        "unfinished": unfinished(result),
        "legend": legend(result.evaluation) if result.evaluation else [],
        "parameters": [shorten_path(path) for path in paths],
        "trials": [
            {
                "name": trial.name,
                "status": trial.status + (f" (as trial {trial.reused_from})" if trial.reused_from else ""),
                "dev": f"{trial.best.score:.2f}" if trial.best else "",
                "step": f"{trial.best.step:,}" if trial.best else "",
                "progress": f"{trial.metrics[-1].progress:.0f} %" if trial.metrics else "",
                "seconds": f"{trial.seconds:.0f}",
                "values": [format_value(trial.values[path]) for path in paths],
                "reason": trial.reason,
                "best": result.best_trial is not None and trial.name == result.best_trial.name,
            }
            for trial in ranked
        ],
        "importances": importances(space, result.trials),
        "recipe": recipe_yaml(result.recipe),
        "space": recipe_yaml(result.sweep),
        "version": __version__,
    }


def _subtitle(result: SweepResult) -> str:
    ends = [
        f"{sum(t.status == s for t in result.trials)} {s}"
        for s in ("finished", "stopped", "diverged", "failed", "running")
    ]
    counted = ", ".join(end for end in ends if not end.startswith("0 "))
    seconds = sum(trial.seconds for trial in result.trials)
    return f"{len(result.trials)} trials ({counted}), {seconds:,.0f} s of training · distcse {__version__}"


def summary_tiles(result: SweepResult, rows: list[SummaryRow]) -> list[dict[str, str]]:
    """Return the figures at the top of a sweep's page: the best dev score, and the first test score of each model."""
    tiles = []
    if result.best_trial is not None and result.best_trial.best is not None:
        note = f"trial {result.best_trial.name}, step {result.best_trial.best.step:,}"
        tiles.append({"name": "best dev score", "figure": f"{result.best_trial.best.score:.2f}", "note": note})
    averages = [row for row in rows if row.set.startswith("average")] or rows[:1]
    for name, spread in (averages[0].spreads if averages else {}).items():
        spread_note = f", ± {spread.deviation:.2f} over {spread.number} seeds" if spread.number > 1 else ", one seed"
        note = f"{averages[0].suite.upper()} {averages[0].set}{spread_note}"
        tiles.append({"name": name, "figure": number(averages[0].measure, spread.mean), "note": note})
    return tiles


_TAU2, _TAU3 = "objective.rank.tau2", "objective.rank.tau3"
_ENDS = {"finished": COLORS[0], "stopped": MUTED, "diverged": COLORS[1], "failed": COLORS[5]}
"""Colors of trials, by how they ended."""
_CELLS = 8
"""Most values of a temperature that are drawn as a grid of cells; more are drawn as points."""


def sweep_pictures(trials: Sequence[Trial], importances: Mapping[str, float]) -> list[Picture]:
    """Return all charts that have data."""
    scored = [trial for trial in trials if trial.best is not None]
    valid = [trial for trial in scored if trial.status not in ("diverged", "failed")]
    if not valid:
        return []
    drawn = [
        _temperatures(valid),
        _importance(importances) if importances else None,
        _curves(scored),
    ]
    return [picture for picture in drawn if picture is not None]


def _temperatures(trials: Sequence[Trial]) -> Picture | None:
    """Draw the dev score by the student's and the teachers' temperature, as Figure 3 of RankCSE (Liu et al. 2023)."""
    points = [(t.values.get(_TAU2), t.values.get(_TAU3), _score(t)) for t in trials]
    found = [(float(x), float(y), score) for x, y, score in points if x is not None and y is not None]
    columns, rows = sorted({x for x, _, _ in found}), sorted({y for _, y, _ in found})
    if len(columns) < 2 or len(rows) < 2:
        return None
    low, high = min(score for *_, score in found), max(score for *_, score in found)
    strength = lambda score: 0.1 + 0.8 * ((score - low) / (high - low) if high > low else 1.0)  # noqa: E731
    cells = max(len(columns), len(rows)) <= _CELLS

    def draw(axes: Axes) -> None:
        if cells:
            best = {(x, y): max(s for a, b, s in found if (a, b) == (x, y)) for x, y, _ in found}
            for (x, y), score in best.items():
                across, up = columns.index(x), rows.index(y)
                axes.bar(across, 0.94, 0.94, up - 0.47, color=COLORS[0], alpha=strength(score))
                axes.annotate(f"{score:.2f}", (across, up), ha="center", va="center", fontsize=7, color=INK)
            axes.set_xticks(range(len(columns)), [f"{x:g}" for x in columns])
            axes.set_yticks(range(len(rows)), [f"{y:g}" for y in rows])
            axes.grid(visible=False)
        else:
            for x, y, score in sorted(found, key=lambda point: point[2]):
                axes.plot([x], [y], "o", color=COLORS[0], alpha=strength(score), markersize=7, markeredgewidth=0)
            x, y, score = max(found, key=lambda point: point[2])
            axes.plot([x], [y], "o", color=COLORS[1], markerfacecolor="none", markersize=10)
            axes.annotate(
                f"{score:.2f}", (x, y), (0, 8), textcoords="offset points", ha="center", fontsize=7.5, color=INK
            )
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.set_xlabel("τ2, the student's")
        axes.set_ylabel("τ3, the teachers'")

    what = "Best dev score of each pair" if cells else "Dev score of each trial, stronger if better"
    return Picture("Temperatures", f"{what}; as the RankCSE paper's Figure 3.", svg("temperatures", draw))


def _importance(importances: Mapping[str, float]) -> Picture:
    def draw(axes: Axes) -> None:
        names = [shorten_path(path) for path in importances]
        bars = axes.barh(range(len(names)), [100 * share for share in importances.values()], 0.7, color=COLORS[2])
        axes.bar_label(
            bars, [f"{100 * share:.0f} %" for share in importances.values()], padding=2, fontsize=7, color=MUTED
        )
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.margins(x=0.14)
        axes.grid(axis="y", visible=False)

    note = "Fraction of the dev scores' variance that each parameter explains (fANOVA), without parameters with an expression."
    return Picture("Importance", note, svg("importance", draw, 0.75 + 0.26 * len(importances)))


def _curves(trials: Sequence[Trial]) -> Picture:
    best = find_best_trial(trials)

    def draw(axes: Axes) -> None:
        for status, color in _ENDS.items():
            with_status = [trial for trial in trials if trial.status == status]
            for index, trial in enumerate(with_status):
                steps = [entry.progress for entry in trial.metrics]
                found = [entry.score for entry in trial.metrics]
                label = f"{status} ({len(with_status)})" if index == 0 else None
                axes.plot(
                    steps, found, color=color, alpha=0.45, linewidth=1.1, label=label, marker="." * (len(steps) == 1)
                )
        if best is not None:
            steps = [entry.progress for entry in best.metrics]
            axes.plot(steps, [entry.score for entry in best.metrics], color=INK, linewidth=1.8, label="best")
        axes.set_xlabel("% of training")
        legend_above(axes)

    return Picture("Learning curves", "Dev score of every trial.", svg("curves", draw, HEIGHT + 0.3))


def _score(trial: Trial) -> float:
    assert trial.best is not None
    return trial.best.score


_MIN_TRIALS = 4
"""Fewer trials give no importances."""


def importances(space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """Return the fraction of the best dev scores' variance that each parameter explains, the largest first.

    Parameters with an expression are left out. A trial that was stopped early counts with its best score, as in the search.

    Source: fANOVA, Hutter et al. 2014.
    """
    import optuna
    from optuna.distributions import FloatDistribution

    ended = [trial for trial in trials if trial.status in ("finished", "stopped") and not trial.reused_from]
    scored = [(trial, trial.best) for trial in ended if trial.best]
    if len(scored) < _MIN_TRIALS or len({best.score for _, best in scored}) == 1:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    weights = {path: FloatDistribution(0.0, 1.0) for path, parameter in space.free.items() if parameter.simplex}
    distributions = {**space.distributions(), **weights}
    study = optuna.create_study(direction="maximize")
    for trial, best in scored:
        values = {path: space.plain(trial.values[path]) for path in distributions}
        study.add_trial(optuna.create_trial(params=values, distributions=distributions, value=best.score))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {path: float(share) for path, share in found.items()}
