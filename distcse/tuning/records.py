"""Records of trials on the sweep's storage: one small JSON file per trial, replaced atomically.

Reports and resumed sweeps read trials only from here; Ray Tune's own state only determines what it runs next.
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
    """Percent of the trial's training that was done."""
    score: float
    seconds: float
    """Wall time of the trial until then, over all its starts."""


@dataclass(frozen=True)
class Trial:
    """A set of values, and the scores and status of its training."""

    name: str
    values: dict[str, Any]
    """By recipe path."""
    begun: float = 0.0
    """Unix time."""
    status: Status = "running"
    """`running`, `finished`, `stopped` by the scheduler, `diverged` (a loss was not finite), or `failed` permanently."""
    reported: list[TrialMetric] = field(default_factory=list)
    why: str = ""
    """The error of a trial that diverged or failed."""
    starts: int = 1
    """How often a process started to train it."""
    recalled_from: str = ""
    """Name of a finished trial with the same values, whose scores this one copies instead of training."""

    @property
    def best(self) -> TrialMetric | None:
        """The best dev score; of equal ones, the earliest."""
        return max(self.reported, key=lambda entry: (entry.score, -entry.step)) if self.reported else None

    @property
    def ended(self) -> bool:
        """Whether the trial is not running any more."""
        return self.status != "running"

    @property
    def seconds(self) -> float:
        """Wall time up to the last dev score, over all starts."""
        return 0.0 if self.recalled_from or not self.reported else self.reported[-1].seconds

    def with_score(self, scored: TrialMetric) -> Trial:
        """Return the trial with another dev score, which replaces those of the same and later steps."""
        return replace(self, reported=[entry for entry in self.reported if entry.step < scored.step] + [scored])

    def write(self, folder: Path) -> None:
        """Write the record into the trial's folder."""
        write_text_atomic(folder / _FILE, dump_checked_json(asdict(self)))


def read_trial(folder: Path) -> Trial | None:
    """Read a trial's record; None if the folder has none.

    Raises:
        RunRecordError: The record is damaged.
    """
    file = folder / _FILE
    if not fetch(file):
        return None
    try:
        found = load_checked_json(file)
    except (OSError, ValueError) as broken:
        raise RunRecordError(
            f"{to_uri(file)} cannot be read ({broken}), so the trial's scores are lost; remove {to_uri(folder)}, then --resume "
            "continues the sweep without it"
        ) from None
    return Trial(**{**found, "reported": [TrialMetric(**entry) for entry in found["reported"]]})


def read_trials(folder: Path) -> list[Trial]:
    """Read all trials in a sweep's trials folder, in the order in which they began.

    Raises:
        RunRecordError: A record is damaged.
    """
    found = [read_trial(trial_folder) for trial_folder in _folders(folder)]
    return sorted((trial for trial in found if trial is not None), key=lambda trial: (trial.begun, trial.name))


def readable_trials(folder: Path) -> list[Trial]:
    """Read all trials in a folder except those with damaged records."""
    found = []
    for trial_folder in _folders(folder):
        try:
            found.append(read_trial(trial_folder))
        except RunError:
            continue  # read_trials reports it
    return [trial for trial in found if trial is not None]


def register_trial(trials: Path, name: str) -> None:
    """Add a trial to the list of names, because listing object storage may be outdated; only the driver calls this."""
    if isinstance(trials, RemotePath) and name not in (known := _registered_names(trials)):
        write_text_atomic(trials / _LIST, dump_checked_json({"names": [*known, name]}))


def _folders(trials: Path) -> list[Path]:
    if isinstance(trials, RemotePath):
        return [trials / name for name in _registered_names(trials)]
    return [trial_folder for trial_folder in trials.iterdir() if trial_folder.is_dir()] if trials.is_dir() else []


def _registered_names(trials: Path) -> list[str]:
    if not fetch(trials / _LIST):
        return []
    names: list[str] = load_checked_json(trials / _LIST)["names"]
    return names


def find_best_trial(trials: Iterable[Trial]) -> Trial | None:
    """Return the trial with the best dev score; of equal ones a finished trial, then the first one. None without scores.

    Trials that diverged or failed are left out, whatever they scored before.
    """
    candidates = [trial for trial in trials if trial.best is not None and trial.status in ("finished", "stopped")]
    return max(candidates, key=lambda t: (t.best.score if t.best else 0.0, t.status == "finished"), default=None)
