"""Records of trials on the sweep's storage: one small JSON file per trial, replaced atomically.

Reports and resumed sweeps read trials only from here; Ray Tune's own state only determines what it runs next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from distcse.errors import RunError, RunRecordError
from distcse.storage import ArtifactStore

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
    started_at: float = 0.0
    """Unix time."""
    status: Status = "running"
    """`running`, `finished`, `stopped` by the scheduler, `diverged` (a loss was not finite), or `failed` permanently."""
    metrics: list[TrialMetric] = field(default_factory=list)
    reason: str = ""
    """The error of a trial that diverged or failed."""
    num_starts: int = 1
    """How often a process started to train it."""
    reused_from: str = ""
    """Name of a finished trial with the same values, whose scores this one copies instead of training."""

    @property
    def best(self) -> TrialMetric | None:
        """The best dev score; of equal ones, the earliest."""
        return max(self.metrics, key=lambda entry: (entry.score, -entry.step)) if self.metrics else None

    @property
    def ended(self) -> bool:
        """Whether the trial is not running any more."""
        return self.status != "running"

    @property
    def seconds(self) -> float:
        """Wall time up to the last dev score, over all starts."""
        return 0.0 if self.reused_from or not self.metrics else self.metrics[-1].seconds

    def with_score(self, scored: TrialMetric) -> Trial:
        """Return the trial with another dev score, which replaces those of the same and later steps."""
        return replace(self, metrics=[entry for entry in self.metrics if entry.step < scored.step] + [scored])

    def write(self, folder: ArtifactStore) -> None:
        """Write the record into the trial's folder."""
        folder.write_json(_FILE, asdict(self))


def read_trial(folder: ArtifactStore) -> Trial | None:
    """Read a trial's record; None if the folder has none."""
    try:
        if (found := folder.read_json(_FILE)) is None:
            return None
        return Trial(**{**found, "metrics": [TrialMetric(**entry) for entry in found["metrics"]]})
    except (OSError, ValueError, KeyError, TypeError) as broken:  # KeyError, TypeError: a record of an earlier version
        raise RunRecordError(
            f"{folder}/{_FILE} cannot be read ({broken}), so the trial's scores are lost; remove {folder}, then --resume "
            "continues the sweep without it"
        ) from None


def read_trials(folder: ArtifactStore) -> list[Trial]:
    """Read all trials in a sweep's trials folder, in the order of their start."""
    found = [read_trial(trial_folder) for trial_folder in _folders(folder)]
    return sorted((trial for trial in found if trial is not None), key=lambda trial: (trial.started_at, trial.name))


def readable_trials(folder: ArtifactStore) -> list[Trial]:
    """Read all trials in a folder except those with damaged records."""
    found = []
    for trial_folder in _folders(folder):
        try:
            found.append(read_trial(trial_folder))
        except RunError:
            continue  # read_trials reports it
    return [trial for trial in found if trial is not None]


def register_trial(store: ArtifactStore, name: str) -> None:
    """Add a trial to the list of names, because listing object storage may be outdated; only the driver calls this."""
    if store.is_remote and name not in (known := _registered_names(store)):
        store.write_json(_LIST, {"names": [*known, name]})


def _folders(trials: ArtifactStore) -> list[ArtifactStore]:
    names = _registered_names(trials) if trials.is_remote else sorted(trials.list_names())
    return [trials / name for name in names]


def _registered_names(trials: ArtifactStore) -> list[str]:
    listed = trials.read_json(_LIST)
    return [] if listed is None else list(listed["names"])


def find_best_trial(trials: Iterable[Trial]) -> Trial | None:
    """Return the trial with the best dev score; of equal ones a finished trial, then the first one. None without scores.

    Trials that diverged or failed are left out, whatever they scored before.
    """
    candidates = [trial for trial in trials if trial.best is not None and trial.status in ("finished", "stopped")]
    return max(candidates, key=lambda t: (t.best.score if t.best else 0.0, t.status == "finished"), default=None)


def rows_of(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Return one row per trial, in the given order, numbered from 1."""
    parameters = list(dict.fromkeys(path for trial in trials for path in trial.values))
    return [
        {
            "trial": number,
            "status": trial.status,
            "dev": trial.best.score if trial.best else None,
            "dev_step": trial.best.step if trial.best else None,
            "progress": trial.metrics[-1].progress if trial.metrics else 0.0,
            "seconds": trial.seconds,
            "num_starts": trial.num_starts,
            **{path: _cell(trial.values.get(path)) for path in parameters},
            "reason": trial.reason,
            "reused_from": trial.reused_from,
            "folder": trial.name,
        }
        for number, trial in enumerate(trials, start=1)
    ]


def write_tables(trials: Sequence[Trial], store: ArtifactStore) -> None:
    """Write trials.parquet and trials.csv into a folder; nothing without trials."""
    if not trials:
        return
    table = pa.Table.from_pylist(rows_of(trials))
    with store.write("trials.parquet") as file:
        pa.parquet.write_table(table, file)
    with store.write("trials.csv") as file:
        pa.csv.write_csv(table, file)


def _cell(value: Any) -> Any:
    return str(value) if isinstance(value, list) else value
