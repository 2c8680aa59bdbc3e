"""Progress for people: a live view on a terminal, plain lines in a log; one table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from distcse.evaluation import Evaluation
from distcse.events import DevScore, Doing, Event, InGroup, Note, Stage, Steps, TrialNews
from distcse.report.grids import Grid, grids, legend, row_title, spread_text
from distcse.report.knobs import in_a_line
from distcse.teachers.comparison import NEAREST, Comparison
from distcse.tuning.summary import Row

_PLAIN_EVERY_SECONDS = 10.0
_PIPE_WIDTH = 1000


class View(Protocol):
    """Shows events as they come."""

    def show(self, event: Event) -> None:
        """Take one event."""
        ...


class PlainView:
    """One line an event, at most one every few seconds a stage: for job logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: dict[str, float] = {}
        self._began = time.monotonic()

    def show(self, event: Event) -> None:
        if isinstance(event, InGroup):
            self._show(event.event, event.group)
        else:
            self._show(event, "")

    def _show(self, event: Event, group: str) -> None:
        if isinstance(event, Stage):
            self._last.setdefault(event.name, time.monotonic())  # a stage of a few seconds is told once, at its end
            if event.finished or self._due(event.name):
                self._line(_stage_line(event))
        elif isinstance(event, Steps):
            if event.step == event.total or self._due(f"steps {group}"):
                rest = f"{_steps_line(event)}  {_left(event)} left"
                self._line(f"{group or 'train':<9} step {event.step}/{event.total}  {rest}")
        elif isinstance(event, DevScore):
            self._line(f"{group or 'dev':<9} {_dev_line(event)}")
        elif isinstance(event, Doing):
            self._line(f"{group:<9} {_doing_line(event)}")
        elif isinstance(event, TrialNews):
            if event.status != "running" or self._due(f"trial {event.trial}"):
                self._line(_trial_line(event))
        elif isinstance(event, Note):
            told = f"{group:<9} {event.text}" if group else event.text
            self._line(("warning   " if event.warning else "") + told)

    def _due(self, name: str) -> bool:
        now = time.monotonic()
        if now - self._last.get(name, -_PLAIN_EVERY_SECONDS) < _PLAIN_EVERY_SECONDS:
            return False
        self._last[name] = now
        return True

    def _line(self, text: str) -> None:
        self._console.print(
            f"[{time.monotonic() - self._began:7.1f}s] {text}", markup=False, highlight=False, soft_wrap=True
        )


@dataclass
class _GroupState:
    phase: str = ""
    note: str = ""
    dev: str = ""


class LiveView:
    """A bar for the stage at work, finished stages above it."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._groups: dict[str, _GroupState] = {}

    def show(self, event: Event) -> None:
        if isinstance(event, InGroup):
            self._in_group(event.group, event.event)
        elif isinstance(event, Stage):
            self._stage(event)
        elif isinstance(event, Steps):
            self._advance("train", event.step, event.total, _steps_line(event))
            if event.step == event.total:
                self._end("train")
        elif isinstance(event, DevScore):
            self._print(f"dev       {_dev_line(event)}")
        elif isinstance(event, TrialNews):
            self._trial(event)
        elif isinstance(event, Note):
            self._print(event.text, event.warning)

    def _in_group(self, group: str, event: Event) -> None:
        """A bar a group, all of them one under the other: its phase, its steps, its dev score, or whom it waits for."""
        state = self._groups.setdefault(group, _GroupState())
        if isinstance(event, Doing):
            state.phase, state.note, state.dev = event.phase, _doing_line(event), ""
            if event.activity in ("finished", "dropped"):
                self._end(group)
                self._print(f"{group:<9} {_doing_line(event)}")
            else:
                self._advance(group, 0, None, state.note)
        elif isinstance(event, Steps):
            note = f"{state.note}  {_steps_line(event)}{state.dev}"
            self._advance(group, event.step, event.total, note)
        elif isinstance(event, DevScore):
            state.dev = f"  dev {event.score:.2f} (best {event.best:.2f})"
            self._print(f"{group:<9} {state.phase}  {_dev_line(event)}")
        elif isinstance(event, Note):
            self._print(f"{group:<9} {event.text}", event.warning)

    def _trial(self, event: TrialNews) -> None:
        """A bar for each trial that runs; a line for each that ended."""
        if event.status == "running":
            self._advance(event.trial, int(event.progress), 100, _trial_note(event))
        elif event.trial in self._tasks or event.status != "finished":
            self._end(event.trial)
            self._print(_trial_line(event), event.status in ("diverged", "failed"))

    def _print(self, text: str, warning: bool = False) -> None:
        self._console.print(text, style="yellow" if warning else None, markup=False, highlight=False)

    def _stage(self, event: Stage) -> None:
        if event.finished:
            self._end(event.name)
            self._print(_stage_line(event))
        else:
            self._advance(event.name, event.done, event.total, event.unit)

    def _advance(self, name: str, done: int, total: int | None, note: str) -> None:
        count = f"{done}/{total}" if total else str(done or "")
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, note=note, count=count)
        # An unknown total is an empty bar: rich keeps the old one where it is told None.
        self._progress.update(
            self._tasks[name], completed=done if total else 0, total=total or 1, note=note, count=count
        )

    def _end(self, name: str) -> None:
        if (task := self._tasks.pop(name, None)) is not None:
            self._progress.remove_task(task)


@contextmanager
def open_view() -> Iterator[View]:
    """The view that fits standard error: live on a terminal, plain elsewhere. NO_COLOR is honoured."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield PlainView(console)
        return
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[count]:>9}"),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield LiveView(console, progress)


def print_evaluation(evaluation: Evaluation) -> None:
    """The tables on standard output: a row a model, under it how it compares with the base."""
    console = _for_tables()
    for grid in grids(evaluation):
        console.print(f"\n{grid.title}{f' ({grid.measure})' if grid.measure else ''}", highlight=False, markup=False)
        console.print(_table(grid))
    if evaluation.scores and len(evaluation.models) > 1:
        line = f"Under each row: difference from {evaluation.base}, and the 95 % interval of the paired bootstrap."
        console.print(f"\n{line} Clear ones are marked *.", markup=False, highlight=False, soft_wrap=True)
    for line in legend(evaluation):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _for_tables() -> Console:
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH  # a file has no edge to fold lines at
    return console


def print_summary(rows: Sequence[Row]) -> None:
    """The runs at a sweep's end on standard output: mean and standard deviation over their seeds."""
    if not rows:
        return
    table = Table(show_edge=False, pad_edge=False, box=SIMPLE_HEAD, collapse_padding=True)
    models = list(dict.fromkeys(name for row in rows for name in row.spreads))
    for name in ("set", "measure", *models):
        table.add_column(name, justify="left" if name in ("set", "measure") else "right")
    for row in rows:
        cells = (spread_text(row.measure, row.spreads.get(name)) for name in models)
        table.add_row(row_title(row), row.measure, *cells)
    _for_tables().print(table)


def print_remarks(evaluation: Evaluation) -> None:
    """What was missing and what was odd, on standard error."""
    console = Console(stderr=True)
    for line in evaluation.warnings:
        console.print(f"warning   {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for line in evaluation.missing:
        console.print(f"missing   {line}", markup=False, highlight=False, soft_wrap=True)


def _table(grid: Grid) -> Table:
    table = Table(show_edge=False, pad_edge=False, box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("")
    for name in grid.columns:
        table.add_column(name, justify="right")
    for model, cells in grid.rows.items():
        table.add_row(model, *(Text(cell.text + cell.mark, style="bold" if cell.best else "") for cell in cells))
        if any(cell.difference for cell in cells):
            styles = ("" if cell.clear else "dim" for cell in cells)
            marked = (cell.difference + "*" * cell.clear for cell in cells)
            table.add_row("", *(Text(text, style) for text, style in zip(marked, styles, strict=True)))
    return table


def print_lines(lines: list[str]) -> None:
    """Plain lines on standard output, never wrapped: they are to be copied."""
    console = Console(file=sys.stdout)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_comparison(comparison: Comparison) -> None:
    """How far teachers agree, on standard output."""
    console = _for_tables()
    names = [f"teacher {number}" for number in range(len(comparison.teachers))]
    for name, backbone in zip(names, comparison.teachers, strict=True):
        console.print(f"{name}  {backbone}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nAgreement on {comparison.sentences:,} sentences of the corpus", markup=False, highlight=False)
    table = Table(show_edge=False, pad_edge=False, box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("")
    for title in ("Kendall's τ ×100", f"common in the {NEAREST} nearest, %"):
        table.add_column(title, justify="right")
    for pairing in comparison.pairings:
        both = f"{names[pairing.first]} and {names[pairing.second]}"
        table.add_row(both, f"{pairing.kendall:.1f}", f"{pairing.overlap:.1f}")
    console.print(table)
    console.print("\nWhere they are farthest apart (cosines in the teachers' order)", markup=False, highlight=False)
    for dispute in comparison.disputes:
        cosines = "  ".join(f"{cosine:5.2f}" for cosine in dispute.cosines)
        console.print(f"{cosines}  {dispute.one}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"{' ' * len(cosines)}  {dispute.other}", markup=False, highlight=False, soft_wrap=True)


def _stage_line(event: Stage) -> str:
    if event.finished:
        return f"{event.name:<9} {event.note or f'{event.done:,} {event.unit}'}"
    of = f"/{event.total:,}" if event.total else ""
    return f"{event.name:<9} {event.done:,}{of} {event.unit}"


def _steps_line(event: Steps) -> str:
    losses = "".join(f"  {name} {value:.3f}" for name, value in event.losses.items() if name != "loss")
    share = 100 * event.waited / event.seconds if event.seconds else 0.0
    waited = f"  teachers waited for {share:.1f}%" if share else ""
    return f"loss {event.losses['loss']:.4f}{losses}  {1 / event.seconds:.2f} steps/s{waited}"


def _left(event: Steps) -> str:
    seconds = int((event.total - event.step) * event.seconds)
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def _doing_line(event: Doing) -> str:
    waiting = f" for {', '.join(event.waiting_for)}" if event.waiting_for else ""
    return f"{event.phase + ' ' if event.phase else ''}{event.activity}{waiting}"


def _trial_line(event: TrialNews) -> str:
    why = f"  {event.why}" if event.why else ""
    return f"trial     {event.trial}  {event.status} at {event.progress:.0f} %  {_trial_note(event)}{why}"


def _trial_note(event: TrialNews) -> str:
    score = "" if event.score is None or event.best is None else f"dev {event.score:.2f} (best {event.best:.2f})  "
    return score + in_a_line(event.values)


def _dev_line(event: DevScore) -> str:
    best = "best so far" if event.best_step == event.step else f"best {event.best:.2f} at step {event.best_step}"
    return f"step {event.step}  {event.name} {event.score:.2f}  ({best})"
