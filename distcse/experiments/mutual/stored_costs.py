"""The measured costs of the groups that share workers, stored next to the run's phases so that a resumed run plans with them.

<run>/costs.json    seconds of steps, of scoring, and of a worker's start
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distcse.errors import StorageError
from distcse.events import Listener, LogMessage, ignore
from distcse.experiments.mutual.phase_costs import MeasuredCosts
from distcse.runs.lease import Lease
from distcse.storage import ArtifactStore

_FILE = "costs.json"


class StoredCosts:
    """The measured costs of one run. Measurements on workers with other resources are left out.

    Args:
        run: The run's directory.
        lease: Lease on the directory, checked before each write.
        worker: CPUs and GPUs of one worker.
        emit: Receives a warning if costs cannot be stored or read: no training ends because of an estimate. Default: none does.
    """

    def __init__(self, run: ArtifactStore, lease: Lease, worker: Mapping[str, float], emit: Listener = ignore) -> None:
        self._run, self._emit = replace(run, guard=lease), emit
        self._has_warned = False
        self._state: dict[str, Any] = {"worker": dict(worker), "pause_s": None, "groups": {}}
        try:
            stored = run.read_json(_FILE) or {}
        except (OSError, ValueError) as broken:
            emit(LogMessage(f"costs are measured again, as {run}/{_FILE} cannot be read: {broken}", warning=True))
            stored = {}
        if stored.get("worker") == self._state["worker"]:
            self._state = stored

    @property
    def pause_s(self) -> float | None:
        """Seconds in which workers start; None before they were measured."""
        pause_s: float | None = self._state["pause_s"]
        return pause_s

    def measured(self, group: str) -> MeasuredCosts | None:
        """Return the measured costs of a group; None before the first."""
        found = self._state["groups"].get(group)
        if found is None:
            return None
        steps = {kind: {int(count): s for count, s in steps.items()} for kind, steps in found["steps"].items()}
        return MeasuredCosts(steps, found["scoring_alone_s"])

    def record(self, group: str, measured: MeasuredCosts, pause_s: float) -> None:
        """Store the measured costs of a group, and the seconds in which workers start.

        Raises:
            RunTakenOverError: A later start has taken over the run.
        """
        steps = {kind: {str(count): s for count, s in steps.items()} for kind, steps in measured.steps.items()}
        self._state["groups"][group] = {"steps": steps, "scoring_alone_s": dict(measured.scoring_alone_s)}
        self._state["pause_s"] = pause_s
        try:
            self._run.write_json(_FILE, self._state)
        except StorageError as error:
            if not self._has_warned:
                text = f"the measured costs are not stored, so that a resumed run estimates them: {error}"
                self._emit(LogMessage(text, warning=True))
            self._has_warned = True
