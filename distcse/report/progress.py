"""Shows a run's progress: live bars on a terminal, plain lines in logs, JSON lines for programs, or only warnings.

It imports no PyTorch, so that commands can print at once.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from distcse.devices import host
from distcse.devices.process import repeated
from distcse.events import (
    DevScore,
    Event,
    GroupActivity,
    GroupEvent,
    Listener,
    LogMessage,
    StageProgress,
    StepReport,
    TrialUpdate,
    to_json_line,
)

_PLAIN_EVERY_SECONDS = 10.0
REMINDER_S, REMINDER_INTERVAL_S = 30.0, 1.0
_ACTIVITY_WIDTH = 80
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARKED = 16


def _of_group(event: Event) -> tuple[str, Event]:
    return (event.group, event.event) if isinstance(event, GroupEvent) else ("", event)


class QuietView:
    """Prints only warnings."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, event: Event) -> None:
        """Show an event."""
        _, inner = _of_group(event)
        if isinstance(inner, LogMessage) and inner.warning:
            _print(self._console, f"warning   {inner.text}")


class JsonView:
    """Writes every event immediately as a line of JSON, as in a run's events.jsonl."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def show(self, event: Event) -> None:
        """Show an event."""
        self._file.write(to_json_line(event) + "\n")
        self._file.flush()


class PlainView:
    """Prints one line per event, at most one every 10 seconds per stage, for job logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: dict[str, float] = {}
        self._began = self._printed_at = time.monotonic()
        self._activity = "at the start"
        self._lock = threading.Lock()

    def remind(self) -> None:
        """Print what the run is doing if it has printed nothing for 30 seconds: slow is not hung. Any thread may call it."""
        with self._lock:
            silence_s = time.monotonic() - self._printed_at
            if silence_s >= REMINDER_S:
                activity = textwrap.shorten(self._activity, _ACTIVITY_WIDTH, placeholder=" …")
                load = f"load {os.getloadavg()[0]:.1f} on {host.cpus()} CPUs"
                self._line(f"waiting   {silence_s:.0f} s since the last line, {activity} ({load})")

    def show(self, event: Event) -> None:
        """Show an event."""
        group, event = _of_group(event)
        if (line := _line_of(event, group)) is None:
            return
        with self._lock:
            name = _unfinished(event, group)
            is_at_work = name is not None or isinstance(event, GroupActivity)
            self._activity = f"{'at' if is_at_work else 'after'} {line}"
            if name is None or self._due(name, isinstance(event, StageProgress)):
                is_warning = isinstance(event, LogMessage) and event.warning
                self._line(f"warning   {line}" if is_warning else line)

    def _due(self, name: str, is_stage: bool) -> bool:
        now = time.monotonic()
        # A stage of a few seconds gets one line, at its end.
        last = self._last.setdefault(name, now if is_stage else -_PLAIN_EVERY_SECONDS)
        if now - last < _PLAIN_EVERY_SECONDS:
            return False
        self._last[name] = now
        return True

    def _line(self, text: str) -> None:
        self._printed_at = time.monotonic()
        _print(self._console, f"[{time.monotonic() - self._began:7.1f}s] {text}")


@dataclass
class _State:
    """State of a run or of a group."""

    note: str = ""
    scores: list[float] = field(default_factory=list)


class LiveView:
    """Shows a bar for the current stage, with finished stages above it; narrow terminals cut off the right end."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._begun: dict[str, tuple[float, int]] = {}
        self._states: dict[str, _State] = {}

    def show(self, event: Event) -> None:
        """Show an event."""
        group, event = _of_group(event)
        state, line = self._states.setdefault(group, _State()), _line_of(event, group)
        if isinstance(event, GroupActivity):
            state.note, state.scores = _activity_line(event), []
            self._begun.pop(group, None)
            if event.activity in ("finished", "dropped"):
                self._end(group, line)
            else:
                self._advance(group, 0, None, state.note)
        elif isinstance(event, StageProgress):
            name = group or event.name
            if event.finished and not group:
                self._end(name, line)
            else:
                left, note = self._time_left(name, event), state.note if group else event.unit
                self._advance(name, event.done, event.total, note, left)
        elif isinstance(event, StepReport):
            dev = f"dev {state.scores[-1]:.2f} {sparkline(state.scores)}" if state.scores else ""
            parts = (state.note, _pace(event), dev, _losses(event), _waited(event))
            self._advance(group or "train", event.step, event.total, "  ".join(filter(None, parts)), _left(event))
            if event.step == event.total and not group:
                self._end("train")
        elif isinstance(event, TrialUpdate) and event.status == "running":
            self._advance(event.trial, int(event.progress), 100, _trial_note(event))
        elif isinstance(event, TrialUpdate):
            if event.trial in self._tasks or event.status != "finished":
                self._end(event.trial, line, event.status in ("diverged", "failed"))
        elif line is not None:
            if isinstance(event, DevScore):
                state.scores.append(event.score)
            _print(self._console, line, isinstance(event, LogMessage) and event.warning)

    def _time_left(self, name: str, event: StageProgress) -> str:
        """Estimate the remaining time from what was done since the stage's first event: a resumed one begins in its middle."""
        now = time.monotonic()
        began_at, done_before = self._begun.setdefault(name, (now, event.done))
        done = event.done - done_before
        return _clock((event.total - event.done) * (now - began_at) / done) if event.total and done > 0 else ""

    def _advance(self, name: str, done: int, total: int | None, note: str, left: str = "") -> None:
        count = f"{done:,}/{total:,}" if total else f"{done:,}" if done else ""
        fields: dict[str, Any] = {"count": count, "left": left, "note": note}
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, **fields)
        # An unknown total is an empty bar, since rich keeps the previous total if it gets None.
        self._progress.update(self._tasks[name], completed=done if total else 0, total=total or 1, **fields)

    def _end(self, name: str, line: str | None = None, is_warning: bool = False) -> None:
        self._begun.pop(name, None)
        if (task := self._tasks.pop(name, None)) is not None:
            self._progress.remove_task(task)
        if line is not None:
            _print(self._console, line, is_warning)


View = QuietView | JsonView | PlainView | LiveView


@contextmanager
def open_view(quiet: bool = False, json: bool = False, is_loading: bool = False) -> Iterator[View]:
    """Open a view of events: live on a terminal, and in a notebook with ipywidgets; plain otherwise. NO_COLOR is respected.

    With `is_loading`, the first line says that PyTorch is loaded next.
    """
    console = Console(stderr=True)
    loading = LogMessage("loading   PyTorch and transformers: about 5 s on a quiet machine")
    if json:
        yield JsonView(sys.stdout)
    elif quiet:
        yield QuietView(console)
    elif not (console.is_terminal or (console.is_jupyter and find_spec("ipywidgets"))):
        view = PlainView(console)
        with repeated(view.remind, REMINDER_INTERVAL_S, "reminders"):
            if is_loading:
                view.show(loading)
            yield view
    else:
        with live_progress(console) as progress:
            live = LiveView(console, progress)
            if is_loading:
                live.show(loading)
            yield live


@contextmanager
def open_listener(listener: Listener | None) -> Iterator[Listener]:
    """Yield the caller's listener, or that of a new view if it is None."""
    if listener is not None:
        yield listener
        return
    with open_view() as view:
        yield view.show


def live_progress(console: Console) -> Progress:
    """Return progress bars as wide as the terminal; a narrow one shortens only the note at the right."""
    return Progress(
        TextColumn("{task.description:<9}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=20 if console.width >= 80 else 10),
        TextColumn("{task.fields[count]}", markup=False, justify="right", table_column=Column(no_wrap=True)),
        TextColumn(
            "{task.fields[left]}", markup=False, justify="right", style="cyan", table_column=Column(no_wrap=True)
        ),
        TextColumn(
            "{task.fields[note]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        ),
        console=console,
        transient=True,
        expand=True,
    )


def sparkline(scores: Sequence[float]) -> str:
    """Return the last 16 scores as block characters, scaled from the lowest to the highest."""
    shown = scores[-_SPARKED:]
    low, spread = min(shown), max(shown) - min(shown)
    return "".join(_SPARKS[int((score - low) / spread * (len(_SPARKS) - 1)) if spread else 0] for score in shown)


def _line_of(event: Event, group: str) -> str | None:
    """Return the line of an event, without the word that marks a warning; None for events that are not shown."""
    if isinstance(event, StageProgress):
        title = f"{group:<9} {event.name}" if group else f"{event.name:<9}"
        of = f"/{event.total:,}" if event.total and not event.finished else ""
        note = event.note if event.finished else ""
        return f"{title} {note or f'{event.done:,}{of} {event.unit}'}"
    if isinstance(event, StepReport):
        parts = (_losses(event), _pace(event), _waited(event), f"{_left(event)} left")
        return f"{group or 'train':<9} step {event.step}/{event.total}  {'  '.join(filter(None, parts))}"
    if isinstance(event, DevScore):
        best = "best so far" if event.best_step == event.step else f"best {event.best:.2f} at step {event.best_step}"
        return f"{group or 'dev':<9} step {event.step}  {event.name} {event.score:.2f}  ({best})"
    if isinstance(event, GroupActivity):
        return f"{group:<9} {_activity_line(event)}"
    if isinstance(event, TrialUpdate):
        reason = f"  {event.reason}" if event.reason else ""
        return f"trial     {event.trial}  {event.status} at {event.progress:.0f} %  {_trial_note(event)}{reason}"
    if isinstance(event, LogMessage):
        return f"{group:<9} {event.text}" if group else event.text
    return None


def _unfinished(event: Event, group: str) -> str | None:
    """Return the name of a stage, training or trial that is not at its end; None for other events."""
    if isinstance(event, StageProgress):
        return None if event.finished else f"{group} {event.name}"
    if isinstance(event, StepReport):
        return None if event.step == event.total else f"steps {group}"
    return f"trial {event.trial}" if isinstance(event, TrialUpdate) and event.status == "running" else None


def _print(console: Console, text: str, is_warning: bool = False) -> None:
    """Print a line as it is, without wrapping; a warning in yellow."""
    console.print(text, style="yellow" if is_warning else None, markup=False, highlight=False, soft_wrap=True)


def _losses(event: StepReport) -> str:
    parts = "".join(f"  {name} {value:.3f}" for name, value in event.losses.items() if name != "loss")
    return f"loss {event.losses['loss']:.4f}{parts}"


def _pace(event: StepReport) -> str:
    return f"{1 / event.seconds:.2f} steps/s" if event.seconds else ""


def _waited(event: StepReport) -> str:
    share = 100 * event.teacher_wait_s / event.seconds if event.seconds else 0.0
    return f"teacher wait {share:.1f}%" if share else ""


def _left(event: StepReport) -> str:
    return _clock((event.total - event.step) * event.seconds)


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def _activity_line(event: GroupActivity) -> str:
    waiting = f" for {', '.join(event.waiting_for)}" if event.waiting_for else ""
    return f"{event.phase + ' ' if event.phase else ''}{event.activity}{waiting}"


def _trial_note(event: TrialUpdate) -> str:
    score = "" if event.score is None or event.best is None else f"dev {event.score:.2f} (best {event.best:.2f})  "
    return score + format_values(event.values)


def shorten_path(path: str) -> str:
    """Return the last parts of a recipe path: `rank.tau2`, `encoders.0.alpha`, `lr`."""
    parts = path.split(".")
    last_parts = parts[-3:] if len(parts) > 2 and parts[-2].isdigit() else parts[-2:]
    return ".".join(last_parts).removeprefix("training.").removeprefix("objective.")


def format_value(value: Any) -> str:
    """Format a value; floats with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_values(values: Mapping[str, Any]) -> str:
    """Format values by their short paths, in one line."""
    return "  ".join(f"{shorten_path(path)}={format_value(value)}" for path, value in values.items())


def print_lines(lines: list[str]) -> None:
    """Print lines on standard output without wrapping, so that they can be copied."""
    console = Console(file=sys.stdout)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_json(lines: Iterable[Mapping[str, Any]]) -> None:
    """Print one JSON object per line on standard output, for programs."""
    for line in lines:
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    sys.stdout.flush()
