"""Writes an evaluation's report: a self-contained HTML page, and the same as Markdown."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from distcse import __version__
from distcse.devices.host import installed_version
from distcse.evaluation import Evaluation
from distcse.evaluation.bootstrap import RESAMPLES
from distcse.report.exports import write_exports
from distcse.report.grids import (
    NOTICED,
    SPEED_COLUMNS,
    TRANSDUCTIVE,
    find_published,
    grids,
    legend,
    markdown_table,
    number,
    size_and_speed,
)
from distcse.report.history import History
from distcse.report.plots import colour_of, pictures
from distcse.storage import ArtifactStore, open_store

_PACKAGES = ("torch", "transformers", "scipy", "scikit-learn")


def write_pages(evaluation: Evaluation, folder: Path | ArtifactStore, history: History | None = None) -> list[Path]:
    """Write scores.csv, scores.tex and the pages into a folder; return the paths of the two pages."""
    write_exports(evaluation, folder)
    return write_page_files(folder, html(evaluation, history), markdown(evaluation, history))


def write_page_files(folder: Path | ArtifactStore, page: str, text: str) -> list[Path]:
    """Write report.html and report.md, each atomically, and return their paths."""
    store = open_store(folder)
    store.write_text("report.html", page)
    store.write_text("report.md", text)
    return [store.path / "report.html", store.path / "report.md"]


def html(evaluation: Evaluation, history: History | None = None) -> str:
    """Return the report as a self-contained HTML page."""
    page = environment(escape=True).get_template("page.html")
    return page.render(**_content(evaluation, history), pictures=pictures(evaluation, history))


def markdown(evaluation: Evaluation, history: History | None = None) -> str:
    """Return the report as Markdown, without charts."""
    page = environment(escape=False).get_template("page.md")
    return page.render(**_content(evaluation, history)).strip() + "\n"


@cache
def environment(escape: bool) -> Environment:
    """Return the Jinja environment of the pages' templates; undefined variables are errors."""
    environment = Environment(
        loader=PackageLoader("distcse.report", "."),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = lambda text: " ".join(str(text).replace("|", "\\|").split())
    return environment


def _content(evaluation: Evaluation, history: History | None) -> dict[str, Any]:
    names = [about.name for about in evaluation.models]
    tables = [(grid, find_published(grid)) for grid in grids(evaluation)]
    sources = [f"{row.model}: {row.source}" for _, papers in tables for row, _ in papers]
    title = history.name if history else " · ".join(names)
    return {
        "title": title,
        "subtitle": _subtitle(evaluation, history),
        "tiles": _tiles(evaluation, history),
        "marks": legend(evaluation),
        "mark_signs": (NOTICED, TRANSDUCTIVE),
        "evaluation": evaluation,
        "tables": tables,
        "sources": list(dict.fromkeys(sources)),
        "resamples": f"{RESAMPLES:,}",
        "colours": {name: colour_of(evaluation, name) for name in names},
        "history": history,
        "facts": _facts(evaluation, history),
        "markdown_table": markdown_table,
        "speed_columns": SPEED_COLUMNS,
        "size_and_speed": size_and_speed,
    }


def _subtitle(evaluation: Evaluation, history: History | None) -> str:
    sets = len({(score.suite, score.set) for score in evaluation.scores if not score.average})
    models = len(evaluation.models)
    measured = f"{models} model{'s' * (models > 1)}, {sets} set{'s' * (sets > 1)}, {_duration(evaluation.seconds)}"
    trained = f"Trained and measured in {_duration(history.seconds)}; " if history else "Measured: "
    return f"{trained}{measured} · distcse {__version__}"


def _tiles(evaluation: Evaluation, history: History | None) -> list[dict[str, str]]:
    """Return the headline figures: the first suite's average (or first score) of every model, and the best dev score."""
    tiles = []
    if evaluation.scores:
        first = evaluation.scores[0]
        same = [s for s in evaluation.scores if (s.suite, s.measure) == (first.suite, first.measure)]
        shown = next((score for score in same if score.average), first)
        tiles = [
            {"name": model, "figure": number(shown.measure, value), "note": f"{shown.suite.upper()} {shown.set}"}
            for model, value in shown.values.items()
        ]
    if history and history.best:
        step, score = history.best
        tiles.append(
            {
                "name": f"best {history.dev_name}",
                "figure": f"{score:.2f}",
                "note": f"at step {step:,}" if step else "the start: no checkpoint is better",
            }
        )
    return tiles


def _facts(evaluation: Evaluation, history: History | None) -> dict[str, str]:
    if history is None:
        circumstances = {"platform": platform.platform(), "Python": platform.python_version()}
        versions = {name: installed_version(name) for name in _PACKAGES}
    else:
        circumstances, versions = history.circumstances, history.versions
    return {**evaluation.settings, **circumstances, **versions, "distcse": __version__}


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
