"""The state of a run: which group is through which phase, and the labels. Whatever is killed, nothing noted here is lost.

<run>/ledger.json                 what follows below, replaced atomically
      labels/start-bert.npy       scores of one group
      labels/start.npy            labels of all, which the next phase learns from
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.errors import ResumeMismatchError, RunRecordError
from distcse.experiments.mutual.phase_trainer import PhaseResult
from distcse.experiments.mutual.phases import Phase
from distcse.files import dump_checked_json, load_checked_json, storage_errors
from distcse.runs.lease import Lease
from distcse.storage import atomic_write, fetch, write_text_atomic

Scores = NDArray[np.float32]


class PhaseStore:
    """Notes of one run; several threads may write.

    Args:
        run: The run's directory.
        lease: Checked before each write; None only reads.

    Raises:
        RunError: The file there is none of ours; when writing, a later start of the run has taken it over.
    """

    def __init__(self, run: Path, lease: Lease | None = None) -> None:
        self._lease = lease
        self._file = run / "ledger.json"
        self._labels = run / "labels"
        with storage_errors(self._labels):
            self._labels.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._state: dict[str, Any] = {"pairs": None, "posted": {}, "labels": {}, "dropped": {}, "stopped_after": None}
        if fetch(self._file):
            try:
                self._state = load_checked_json(self._file)
            except (OSError, ValueError) as broken:
                raise RunRecordError(f"{self._file} is not readable: {broken}; start a new run") from None

    @property
    def dropped(self) -> Mapping[str, str]:
        """Groups that the run goes on without, and why."""
        return dict(self._state["dropped"])

    @property
    def stopped_after(self) -> Phase | None:
        """The phase after which no group had got better for long enough."""
        number = self._state["stopped_after"]
        return None if number is None else Phase(number)

    def begin(self, pairs: str) -> None:
        """Note the pairs' fingerprint; `RunError` where the run began with others."""
        with self._lock:
            if self._state["pairs"] not in (None, pairs):
                raise ResumeMismatchError(
                    f"the pairs have changed since {self._file.parent} began; restore pairs.parquet, or start a new run"
                )
            self._state["pairs"] = pairs
            self._write()

    def post(self, group: str, phase: Phase, scores: Scores, trained: PhaseResult | None) -> None:
        """A group is through a phase."""
        with self._lock:
            told = {} if trained is None else {"dev": trained.dev, "step": trained.step, "steps": trained.steps}
            entry = {"sha256": self._store(f"{phase.name}-{group}", scores), **told}
            self._state["posted"].setdefault(str(phase.number), {})[group] = entry
            self._write()

    def posted(self, phase: Phase) -> Mapping[str, Mapping[str, Any]]:
        """Groups that are through a phase: dev score, step, steps."""
        return dict(self._state["posted"].get(str(phase.number), {}))

    def scores(self, group: str, phase: Phase) -> Scores:
        """What a group posted."""
        return self._load(f"{phase.name}-{group}", self._state["posted"][str(phase.number)][group]["sha256"])

    def agree(self, phase: Phase, groups: Sequence[str], labels: Scores) -> None:
        """The labels of a phase, and whose scores they are made of: from now on they are fixed."""
        with self._lock:
            self._state["labels"][str(phase.number)] = {"groups": [*groups], "sha256": self._store(phase.name, labels)}
            self._write()

    def labels(self, phase: Phase) -> Scores | None:
        """The labels of a phase; None as long as there are none."""
        entry = self._state["labels"].get(str(phase.number))
        return None if entry is None else self._load(phase.name, entry["sha256"])

    def drop(self, group: str, why: str) -> None:
        """The run goes on without a group."""
        with self._lock:
            self._state["dropped"][group] = why
            self._write()

    def stop(self, phase: Phase) -> None:
        """No cycle follows this phase's."""
        with self._lock:
            self._state["stopped_after"] = phase.number
            self._write()

    def _store(self, name: str, array: Scores) -> str:
        file = self._labels / f"{name}.npy"
        with atomic_write(file) as beside, open(beside, "wb") as out:
            np.save(out, array)
        return hashlib.sha256(array.tobytes()).hexdigest()

    def _load(self, name: str, expected: str) -> Scores:
        file = self._labels / f"{name}.npy"
        fetch(file)
        try:
            array: Scores = np.load(file, allow_pickle=False)
        except (OSError, EOFError, ValueError) as broken:
            raise RunRecordError(f"{file} cannot be read: {broken}; start a new run") from None
        if hashlib.sha256(array.tobytes()).hexdigest() != expected:
            raise RunRecordError(f"{file} is not what was stored (its checksum differs); start a new run")
        return array

    def _write(self) -> None:
        if self._lease is not None:
            self._lease.check()
        write_text_atomic(self._file, dump_checked_json(self._state))
