"""Writes a sweep's report: a self-contained HTML page, and the same as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distcse import __version__
from distcse.recipe import recipe_yaml
from distcse.report.exports import write_exports, write_summary
from distcse.report.grids import legend, number, row_title, spread_text
from distcse.report.page import environment, write_page_files
from distcse.report.parameters import format_value, shorten_path
from distcse.report.sweep_pictures import sweep_pictures
from distcse.tuning.importance import importances
from distcse.tuning.space import Space
from distcse.tuning.summary import SummaryRow, dev_row, set_rows, variant_of
from distcse.tuning.sweep import SweepResult


def write_sweep_pages(result: SweepResult) -> list[Path]:
    """Write the pages, and the final runs' scores as CSV and LaTeX, into the sweep's folder; return the pages."""
    space = Space(result.sweep, result.recipe)
    content = _content(result, space)
    drawn = sweep_pictures(result.trials, space.parameters, content["importances"])
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
