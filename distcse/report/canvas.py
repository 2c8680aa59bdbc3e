"""Draws the charts of a report as SVG that takes its colors from the page.

Each chart fits on a phone, and several stand in a row on wider pages. Text stays text. Colors are drawn as placeholders and
replaced by CSS variables, so that the same SVG suits a light, a dark and a printed page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SERIES = 6
INK, MUTED, GRID, PAPER = "#010101", "#020202", "#030303", "#040404"
COLORS = tuple(f"#0500{n:02x}" for n in range(SERIES))
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    PAPER: "var(--paper)",
    **{color: f"var(--series-{n})" for n, color in enumerate(COLORS)},
}
WIDTH, HEIGHT = 3.7, 2.7
_LEGEND_LEFT, _LEGEND_KEY, _LEGEND_LETTER, _LEGEND_ROW = 0.85, 0.35, 0.065, 0.16
"""Inches: left of a legend, for an entry's key, for each letter of its name, and for a row."""
_SIZE = r'\s(width|height)="[^"]*"'
_UNUSED_IDS = r' id="[A-Za-z0-9.]+_\d+"'
_FONTS = r"font-family: [^;]*;"
_STYLE = {
    "svg.fonttype": "none",
    "figure.dpi": 72,
    "font.family": "sans-serif",
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 1.2,
}


@dataclass(frozen=True)
class Picture:
    """An SVG element with its title and its caption."""

    title: str
    note: str
    svg: str


def legend_above(axes: Axes) -> None:
    """Add a legend above the axes, where it covers no data, in as many columns as fit; more rows make the figure higher."""
    _, names = axes.get_legend_handles_labels()
    figure = cast(Figure, axes.figure)
    width, height = figure.get_size_inches()
    entry = _LEGEND_KEY + _LEGEND_LETTER * max((len(name) for name in names), default=0)
    columns = max(1, min(3, int((width - _LEGEND_LEFT) / entry)))
    figure.set_size_inches(width, height + _LEGEND_ROW * (-(-len(names) // columns) - 1))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, columnspacing=1.0, borderaxespad=0.2)


def svg(name: str, draw: Callable[[Axes], None], height: float = HEIGHT) -> str:
    """Draw on one pair of axes and return the SVG element, with CSS variables as colors and without a fixed size."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):  # the salt makes ids differ between charts
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.subplots())
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    opening, body = written.getvalue().partition("<svg")[2].split(">", maxsplit=1)
    found = f"<svg{re.sub(_SIZE, '', opening)}>{body}"
    found = re.sub(_UNUSED_IDS, "", re.sub(_FONTS, "", found))
    for placeholder, variable in _VARIABLES.items():
        found = found.replace(placeholder, variable)
    return found.strip()
