"""Charts of an evaluation and of a run's history."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from distcse.evaluation import Evaluation, Score
from distcse.report.canvas import COLORS, GRID, INK, MUTED, PAPER, SERIES, Picture, legend_above, svg
from distcse.report.grids import published_rows
from distcse.report.history import Cycles, History


def pictures(evaluation: Evaluation, history: History | None) -> list[Picture]:
    """Return all charts that have data."""
    drawn = [
        _losses(history) if history else None,
        _dev(history) if history else None,
        *(_cycles(history.cycles) if history and history.cycles else ()),
        _differences(evaluation),
        _plane(evaluation),
        _bars(evaluation, "kcc", "Ranking: Kendall's τ-b", "Mean over lists, ×100."),
        _bars(evaluation, "ndcg", "Ranking: NDCG", "Mean over lists, ×100; the gain is the gold score."),
    ]
    return [picture for picture in drawn if picture is not None]


def color_of(evaluation: Evaluation, model: str) -> int:
    """Return the index of a model's color, the same in every chart and table."""
    return [about.name for about in evaluation.models].index(model) % SERIES


def _losses(history: History) -> Picture | None:
    curves = {part: curve for part, curve in history.losses.items() if not part.endswith("_cos")}
    parts = [part for part in curves if part != "loss"]
    if len(parts) == 1:  # the total equals its only term
        curves = {parts[0]: curves["loss"]}
    if not curves:
        return None

    def draw(axes: Axes) -> None:
        for number, (part, curve) in enumerate(curves.items()):
            steps, values = zip(*curve, strict=True)
            axes.plot(steps, values, color=COLORS[number % SERIES], label=part, marker="." if len(steps) == 1 else "")
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()

    return Picture("Loss", "Means over the steps between two reports.", svg("losses", draw))


def _dev(history: History) -> Picture | None:
    if history.best is None:
        return None
    best_step, best = history.best

    def draw(axes: Axes) -> None:
        steps, scores = zip(*history.dev, strict=True)
        axes.plot(steps, scores, color=COLORS[0], marker=".", markersize=4)
        axes.plot([best_step], [best], marker="o", markersize=8, markerfacecolor="none", color=INK)
        axes.annotate(
            f"{best:.2f}", (best_step, best), xytext=(0, -8), textcoords="offset points", ha="center", va="top"
        )
        axes.margins(y=0.12)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return Picture(f"Dev score: {history.dev_name}", f"Best at step {best_step:,}: the student.", svg("dev", draw))


def _cycles(cycles: Cycles) -> list[Picture]:
    """Draw dev scores by cycle, a line per group and formulation, and the groups' activities over time."""
    drawn = []
    if cycles.dev:

        def draw(axes: Axes) -> None:
            for name, scores in cycles.dev.items():
                group, kind = name.rsplit(" ", 1)
                color = COLORS[cycles.groups.index(group) % SERIES]
                style = "-" if kind == "bi" else "--"
                axes.plot(list(scores), list(scores.values()), style, color=color, marker=".", label=name)
            axes.set_xticks([*cycles.columns], [*cycles.columns.values()])
            axes.margins(y=0.12)
            legend_above(axes)

        note = "Best of each phase on the dev set; dashed: cross-encoders."
        drawn.append(Picture("Dev score by cycle", note, svg("cycles", draw, 3.2)))
    shown = [span for span in cycles.spans if span.activity != "preparing"]
    if shown:

        def draw_timeline(axes: Axes) -> None:
            for span in shown:
                row, color = cycles.groups.index(span.group), COLORS[cycles.groups.index(span.group) % SERIES]
                waits, scores = span.activity == "waiting", span.activity == "scoring"
                fill = GRID if waits else color
                cross = span.phase.endswith("cross")
                height = 0.25 if waits else 0.7
                axes.barh(row, span.end - span.begin, height, span.begin, color=fill, alpha=0.45 if cross else 1.0)
                if scores:
                    axes.barh(row, span.end - span.begin, 0.12, span.begin, color=INK)
            axes.set_yticks(range(len(cycles.groups)), cycles.groups)
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.set_xlabel("seconds")

        note = "Full: training bi-encoders; pale: cross-encoders; dark line: scoring; thin and gray: waiting for other groups."
        height = _rows_height(len(cycles.groups), 1)
        drawn.append(Picture("Side by side", note, svg("timeline", draw_timeline, height)))
    return drawn


def _differences(evaluation: Evaluation) -> Picture | None:
    """Draw every model's difference from the base, with its interval, on the first suite's sets, if there are several."""
    if not evaluation.scores:
        return None
    first = evaluation.scores[0]
    scores = [s for s in evaluation.scores if (s.suite, s.measure) == (first.suite, first.measure)]
    base = evaluation.base
    others = [about.name for about in evaluation.models if about.name != base]
    found = {
        model: [(row, difference) for row, score in enumerate(scores) if (difference := score.against(model, base))]
        for model in others
    }
    if len(scores) < 2 or not any(found.values()):
        return None

    def draw(axes: Axes) -> None:
        for index, (model, entries) in enumerate(found.items()):
            color = COLORS[color_of(evaluation, model)]
            shift = (index - (len(found) - 1) / 2) * 0.7 / max(len(found), 2)
            for row, difference in entries:
                axes.plot([difference.low, difference.high], [row + shift] * 2, color=color)
            rows = [row + shift for row, _ in entries]
            axes.plot(
                [difference.value for _, difference in entries], rows, "o", color=color, markersize=4, label=model
            )
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.margins(y=0.12)
        axes.set_yticks(range(len(scores)), [_short(score) for score in scores])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        legend_above(axes)

    note = "In points; lines are 95 % intervals of the paired bootstrap."
    return Picture(f"Difference from {base}", note, svg("differences", draw, _rows_height(len(scores), len(found))))


def _plane(evaluation: Evaluation) -> Picture | None:
    scores = _by_measure(evaluation, "geometry", "STS-B")
    if not {"alignment", "uniformity"} <= scores.keys():
        return None
    papers = [row for row in published_rows() if (row.suite, row.set) == ("geometry", "STS-B")]

    def draw(axes: Axes) -> None:
        points = [
            (row.values["uniformity"], row.values["alignment"], f"{row.model} (published)", MUTED) for row in papers
        ]
        points += [
            (uniformity, scores["alignment"][model], model, COLORS[color_of(evaluation, model)])
            for model, uniformity in scores["uniformity"].items()
        ]
        for x, y, name, color in points:
            axes.plot([x], [y], "o", color=color, markerfacecolor=PAPER if color == MUTED else color, markersize=6)
            ink = MUTED if color == MUTED else INK
            axes.annotate(name, (x, y), xytext=(0, 6), textcoords="offset points", ha="center", color=ink)
        axes.margins(0.22, 0.14)
        axes.set_xlabel("uniformity (lower spreads better)")
        axes.set_ylabel("alignment (lower is closer)")

    note = "STS-B test. Hollow points: DiffCSE's paper, BERT-base."
    return Picture("Alignment and uniformity", note, svg("plane", draw, 3.1))


def _bars(evaluation: Evaluation, measure: str, title: str, note: str) -> Picture | None:
    scores = [score for score in evaluation.scores if (score.suite, score.measure) == ("ranking", measure)]
    if not scores:
        return None
    models = [about.name for about in evaluation.models if any(about.name in score.values for score in scores)]

    def draw(axes: Axes) -> None:
        thick = 0.8 / len(models)
        for index, model in enumerate(models):
            rows = [row + (index - (len(models) - 1) / 2) * thick for row in range(len(scores))]
            values = [score.values.get(model, 0.0) for score in scores]
            bars = axes.barh(rows, values, 0.86 * thick, color=COLORS[color_of(evaluation, model)], label=model)
            axes.bar_label(bars, [f"{value:.1f}" for value in values], padding=2, fontsize=6.5, color=MUTED)
        axes.set_yticks(range(len(scores)), [_short(score) for score in scores])
        axes.invert_yaxis()
        axes.margins(x=0.14)
        axes.grid(axis="y", visible=False)
        legend_above(axes)

    return Picture(title, note, svg(measure, draw, _rows_height(len(scores), len(models))))


def _by_measure(evaluation: Evaluation, suite: str, of: str) -> dict[str, Mapping[str, float]]:
    return {s.measure: s.values for s in evaluation.scores if (s.suite, s.set) == (suite, of)}


def _short(score: Score) -> str:
    return score.set.replace("average of ", "mean of ")


def _rows_height(rows: int, models: int) -> float:
    return 0.75 + rows * max(0.24, 0.13 * models)
