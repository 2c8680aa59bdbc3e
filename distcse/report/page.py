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
from distcse.evaluation.results import compute_spreads, group_runs, headlines
from distcse.report.exports import write_exports
from distcse.report.grids import (
    find_published,
    grids,
    legend,
    markdown_table,
    overview,
    spread_text,
)
from distcse.report.history import History
from distcse.report.plots import color_of, pictures
from distcse.report.verdict import NOTICED, TRANSDUCTIVE, by_interest, explain, score_name, verdict
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
    title = history.name if history else " · ".join(group_runs(about.name for about in by_interest(evaluation)))
    return {
        "title": title,
        "subtitle": _subtitle(evaluation, history),
        "verdict": [*verdict(evaluation).values()],
        "explanation": explain(evaluation),
        "tiles": _tiles(evaluation, history),
        "overview": overview(evaluation),
        "marks": legend(evaluation),
        "mark_signs": (NOTICED, TRANSDUCTIVE),
        "evaluation": evaluation,
        "tables": tables,
        "sources": list(dict.fromkeys(sources)),
        "resamples": f"{RESAMPLES:,}",
        "colors": {name: color_of(evaluation, name) for name in names},
        "history": history,
        "facts": _facts(evaluation, history),
        "markdown_table": markdown_table,
    }


def _subtitle(evaluation: Evaluation, history: History | None) -> str:
    sets = len({(score.suite, score.set) for score in evaluation.scores if not score.average})
    models = len(evaluation.models)
    measured = f"{models} model{'s' * (models > 1)}, {sets} set{'s' * (sets > 1)}, {_duration(evaluation.seconds)}"
    trained = f"Trained and measured in {_duration(history.seconds)}; " if history else "Measured: "
    return f"{trained}{measured} · distcse {__version__}"


def _tiles(evaluation: Evaluation, history: History | None) -> list[dict[str, str]]:
    """Return the headline figures: the first headline score of every model, students first, and the best dev score."""
    tiles = []
    for first in headlines(evaluation.scores)[:1]:
        spreads = compute_spreads(first)
        tiles = [
            {"name": name, "figure": spread_text(first.measure, spreads[name]), "note": score_name(first)}
            for name in group_runs(about.name for about in by_interest(evaluation))
            if name in spreads
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
