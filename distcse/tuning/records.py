"""What is known of each trial, on the sweep's storage: one small JSON file a trial, replaced atomically.

Whatever a report or a resumed sweep says of a trial comes from here; Ray Tune's own state only says what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from distcse.errors import RunError, RunRecordError
from distcse.files import dump_checked_json, load_checked_json
from distcse.storage import RemotePath, fetch, to_uri, write_text_atomic

Status = Literal["running", "finished", "stopped", "diverged", "failed"]
_FILE, _LIST = "trial.json", "trials.json"


@dataclass(frozen=True)
class TrialMetric:
    """One dev score of a trial."""

    step: int
    progress: float
    """Share of the trial's training that was behind it, in percent."""
    score: float
    seconds: float
    """Wall time that the trial had worked by then, over all its starts."""


@dataclass(frozen=True)
class Trial:
    """One set of values and what it came to."""

    name: str
    values: dict[str, Any]
    """By recipe path."""
    begun: float = 0.0
    """Unix time."""
    status: Status = "running"
    """Finished by itself, stopped by the scheduler, diverged (a loss was not finite), or failed for good."""
    reported: list[TrialMetric] = field(default_factory=list)
    why: str = ""
    """What a trial that diverged or failed said."""
    starts: int = 1
    """Processes that worked on it."""
    recalled_from: str = ""
    """The trial of the same values that was finished already; this one was not trained."""

    @property
    def best(self) -> TrialMetric | None:
        """The best dev score, the earlier of equals."""
        return max(self.reported, key=lambda entry: (entry.score, -entry.step)) if self.reported else None

    @property
    def ended(self) -> bool:
        """Nothing more will be done for it."""
        return self.status != "running"

    @property
    def seconds(self) -> float:
        """Wall time of all its starts up to the last dev score."""
        return 0.0 if self.recalled_from or not self.reported else self.reported[-1].seconds

    def with_score(self, scored: TrialMetric) -> Trial:
        """With a dev score added; a step that was scored before is scored anew."""
        return replace(self, reported=[entry for entry in self.reported if entry.step < scored.step] + [scored])

    def write(self, folder: Path) -> None:
        """Into the trial's folder."""
        write_text_atomic(folder / _FILE, dump_checked_json(asdict(self)))


def read_trial(folder: Path) -> Trial | None:
    """What is known of the trial in a folder; None where none was begun. `RunError` where the file is damaged."""
    file = folder / _FILE
    if not fetch(file):
        return None
    try:
        found = load_checked_json(file)
    except (OSError, ValueError) as broken:
        raise RunRecordError(
            f"{to_uri(file)} cannot be read ({broken}), and the trial's scores are lost; remove {to_uri(folder)} and --resume: "
            "the sweep goes on without it"
        ) from None
    return Trial(**{**found, "reported": [TrialMetric(**entry) for entry in found["reported"]]})


def read_trials(folder: Path) -> list[Trial]:
    """All trials in a folder of trials' folders, the first begun first."""
    found = [read_trial(inside) for inside in _folders(folder)]
    return sorted((trial for trial in found if trial is not None), key=lambda trial: (trial.begun, trial.name))


def readable_trials(folder: Path) -> list[Trial]:
    """The same but for those whose record is damaged: for who looks for something and finds it or not."""
    found = []
    for inside in _folders(folder):
        try:
            found.append(read_trial(inside))
        except RunError:
            continue  # who reads all says so
    return [trial for trial in found if trial is not None]


def register_trial(trials: Path, name: str) -> None:
    """Note that there is a trial: in object storage a list of names is nothing to rely on. Only the sweep's own process does."""
    if isinstance(trials, RemotePath) and name not in (known := _enlisted(trials)):
        write_text_atomic(trials / _LIST, dump_checked_json({"names": [*known, name]}))


def _folders(trials: Path) -> list[Path]:
    if isinstance(trials, RemotePath):
        return [trials / name for name in _enlisted(trials)]
    return [inside for inside in trials.iterdir() if inside.is_dir()] if trials.is_dir() else []


def _enlisted(trials: Path) -> list[str]:
    if not fetch(trials / _LIST):
        return []
    names: list[str] = load_checked_json(trials / _LIST)["names"]
    return names


def winner_of(trials: Iterable[Trial]) -> Trial | None:
    """The trial with the best dev score; of equals one that came to its end, then the first.

    A trial that diverged is none, whatever it had scored before.
    """
    running = [trial for trial in trials if trial.best is not None and trial.status in ("finished", "stopped")]
    return max(running, key=lambda t: (t.best.score if t.best else 0.0, t.status == "finished"), default=None)
