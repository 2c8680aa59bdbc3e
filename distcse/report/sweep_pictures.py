"""Charts of a sweep: values and dev scores, importances, learning curves and costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from distcse.recipe import ParameterSection
from distcse.report.canvas import COLOURS, GRID, HEIGHT, INK, MUTED, WIDE, Picture, legend_above, svg
from distcse.report.parameters import shorten_path
from distcse.tuning.records import Trial, find_best_trial

_TAU2, _TAU3 = "objective.rank.tau2", "objective.rank.tau3"
_CELLS = 8
"""Most values of a temperature that are drawn as a grid of cells; more are drawn as points."""


def sweep_pictures(
    trials: Sequence[Trial], parameters: Mapping[str, ParameterSection], importances: Mapping[str, float]
) -> list[Picture]:
    """Return all charts that have data."""
    scored = [trial for trial in trials if trial.best is not None]
    valid = [trial for trial in scored if trial.status not in ("diverged", "failed")]
    if not valid:
        return []
    drawn = [
        _parallel(valid, parameters),
        _temperatures(valid),
        _importance(importances) if importances else None,
        _curves(scored),
        _costs(trials),
    ]
    return [picture for picture in drawn if picture is not None]


def _parallel(trials: Sequence[Trial], parameters: Mapping[str, ParameterSection]) -> Picture | None:
    """Draw parallel coordinates: an axis per parameter and one for the dev score, a line per trial, stronger if better."""
    paths = [path for path, parameter in parameters.items() if parameter.expression is None]
    best = find_best_trial(trials)
    scores = [_score(trial) for trial in trials]
    low, high = min(scores), max(scores)
    scales = {path: _Scale([trial.values[path] for trial in trials], parameters[path]) for path in paths}

    def draw(axes: Axes) -> None:
        positions = range(len(paths) + 1)
        for trial in sorted(trials, key=_score):
            share = (_score(trial) - low) / (high - low) if high > low else 1.0
            heights = [scales[path].height_of(trial.values[path]) for path in paths] + [share]
            is_best = trial is best
            axes.plot(
                positions,
                heights,
                color=COLOURS[1] if is_best else COLOURS[0],
                alpha=1.0 if is_best else 0.12 + 0.5 * share**2,
                linewidth=2.2 if is_best else 1.2,
            )
        for position, path in enumerate(paths):
            axes.axvline(position, color=GRID, linewidth=0.8)
            for height, text in scales[path].ticks():
                axes.annotate(
                    text, (position, height), (3, 0), textcoords="offset points", fontsize=6.5, va="center", color=MUTED
                )
        axes.axvline(len(paths), color=GRID, linewidth=0.8)
        for height, score in ((0, low), (1, high)):
            axes.annotate(
                f"{score:.2f}",
                (len(paths), height),
                (3, 0),
                textcoords="offset points",
                fontsize=6.5,
                va="center",
                color=INK,
            )
        axes.set_xticks([*positions], [*map(shorten_path, paths), "dev"], rotation=40, ha="right")
        axes.set_yticks([])
        axes.set_xlim(-0.1, len(paths) + 0.35)
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)

    note = "A line per trial, from its values to its best dev score. The best trial has the other colour."
    return Picture("Values and dev score", note, svg("parallel", draw, HEIGHT + 0.6, WIDE), wide=True)


class _Scale:
    """Maps a parameter's values to heights between 0 and 1."""

    def __init__(self, values: Sequence[Any], parameter: ParameterSection) -> None:
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        self._names = None if numbers else sorted({str(value) for value in values})
        self._log = (
            numbers and min(values) > 0 and (parameter.log_uniform is not None or max(values) / min(values) >= 20)
        )
        if self._names is None:
            self._low, self._high = self._scaled(min(values)), self._scaled(max(values))

    def height_of(self, value: Any) -> float:
        if self._names is not None:
            return self._names.index(str(value)) / max(1, len(self._names) - 1)
        return (self._scaled(value) - self._low) / (self._high - self._low) if self._high > self._low else 0.5

    def ticks(self) -> list[tuple[float, str]]:
        if self._names is not None:
            return [(self.height_of(name), name) for name in self._names]
        ends = [(0.0, self._low), (1.0, self._high)] if self._high > self._low else [(0.5, self._low)]
        return [(height, f"{math.exp(end) if self._log else end:.3g}") for height, end in ends]

    def _scaled(self, value: float) -> float:
        return math.log(value) if self._log else float(value)


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
                axes.bar(across, 0.94, 0.94, up - 0.47, color=COLOURS[0], alpha=strength(score))
                axes.annotate(f"{score:.2f}", (across, up), ha="center", va="center", fontsize=7, color=INK)
            axes.set_xticks(range(len(columns)), [f"{x:g}" for x in columns])
            axes.set_yticks(range(len(rows)), [f"{y:g}" for y in rows])
            axes.grid(visible=False)
        else:
            for x, y, score in sorted(found, key=lambda point: point[2]):
                axes.plot([x], [y], "o", color=COLOURS[0], alpha=strength(score), markersize=7, markeredgewidth=0)
            x, y, score = max(found, key=lambda point: point[2])
            axes.plot([x], [y], "o", color=COLOURS[1], markerfacecolor="none", markersize=10)
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
        bars = axes.barh(range(len(names)), [100 * share for share in importances.values()], 0.7, color=COLOURS[2])
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
        for status, colour in (
            ("finished", COLOURS[0]),
            ("stopped", MUTED),
            ("diverged", COLOURS[1]),
            ("failed", COLOURS[5]),
        ):
            with_status = [trial for trial in trials if trial.status == status]
            for number, trial in enumerate(with_status):
                steps = [entry.progress for entry in trial.metrics]
                found = [entry.score for entry in trial.metrics]
                label = f"{status} ({len(with_status)})" if number == 0 else None
                axes.plot(
                    steps, found, color=colour, alpha=0.45, linewidth=1.1, label=label, marker="." * (len(steps) == 1)
                )
        if best is not None:
            steps = [entry.progress for entry in best.metrics]
            axes.plot(steps, [entry.score for entry in best.metrics], color=INK, linewidth=1.8, label="best")
        axes.set_xlabel("% of training")
        legend_above(axes)

    return Picture("Learning curves", "Dev score of every trial.", svg("curves", draw, HEIGHT + 0.3))


def _costs(trials: Sequence[Trial]) -> Picture:
    shades = {"finished": COLOURS[0], "stopped": MUTED, "diverged": COLOURS[1], "failed": COLOURS[5], "running": GRID}

    def draw(axes: Axes) -> None:
        for number, trial in enumerate(trials, start=1):
            axes.bar(number, trial.seconds, 0.8, color=shades[trial.status])
        axes.set_xlabel("trial, in the order of their start")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("seconds")
        axes.grid(axis="x", visible=False)

    total = sum(trial.seconds for trial in trials)
    note = f"{total:,.0f} s of trials in total. Blue: finished; grey: stopped by the scheduler."
    return Picture("Cost of each trial", note, svg("costs", draw))


def _score(trial: Trial) -> float:
    assert trial.best is not None
    return trial.best.score
