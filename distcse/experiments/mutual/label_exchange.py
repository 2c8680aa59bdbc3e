"""Exchange of scores between groups: each posts its scores, and waits for the labels that combine those of all groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from distcse.experiments.mutual.labels import combine
from distcse.experiments.mutual.phase_store import PhaseStore
from distcse.experiments.mutual.phase_trainer import PhaseResult
from distcse.experiments.mutual.phases import Phase
from distcse.experiments.mutual.stored_scores import Scores, StoredScores
from distcse.recipe import MutualRecipe

_POLL_S = 0.5
"""Seconds between checks for a stop request while a group waits."""


class RunEnded(Exception):
    """Ends a group's work early without an error: the run was asked to stop, or another group failed."""


class LabelExchange:
    """Combines the groups' scores into labels. Thread-safe: each group runs in a thread.

    Args:
        recipe: How to combine scores, and when to stop early.
        store: The store of the run's scores and labels.
        ending: Set when the run ends for any reason. Groups that are training see it and stop with a checkpoint.
        stop_requested: Returns whether the run was asked to stop; polled while a group waits.
    """

    def __init__(
        self,
        recipe: MutualRecipe,
        store: PhaseStore,
        ending: threading.Event,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._recipe = recipe
        self._store = store
        self._ending = ending
        self._stop_requested = stop_requested
        self._changed = threading.Condition()
        self._combine_complete()  # the driver may have been killed between the last scores and their labels

    def post(self, group: str, phase: Phase, scores: Scores, trained: PhaseResult | None) -> None:
        """Store a group's (n,) scores of a phase. The last group's scores complete the labels."""
        with self._changed:
            self._store.post(group, phase, scores, trained)
            self._combine_if_complete(phase)
            self._changed.notify_all()

    def missing(self, phase: Phase) -> list[str]:
        """Return the groups that have not posted their scores of a phase."""
        with self._changed:
            posted = self._store.posted(phase)
            return [name for name in self._members() if name not in posted]

    def labels(self, phase: Phase) -> StoredScores | None:
        """Wait for the labels of a phase; None if the run stops early after it.

        Raises:
            RunEnded: The run was asked to stop, or another group failed.
        """
        with self._changed:
            while True:
                # Polled: a signal handler sets the stop flag without notifying the condition.
                if self._ending.is_set() or self._stop_requested():
                    raise RunEnded
                if (labels := self._store.stored_labels(phase)) is not None:
                    stopped = self._store.stopped_after
                    return None if stopped is not None and stopped <= phase else labels
                self._changed.wait(_POLL_S)

    def drop(self, group: str, why: str) -> bool:
        """Continue without a group, and complete the labels that were waiting only for it.

        Returns:
            False, without dropping it, if it is the last group or the run is ending: closing a group makes it fail.
        """
        with self._changed:
            if self._members() == [group] or self._ending.is_set():
                return False
            self._store.drop(group, why)
            self._combine_complete()
            self._changed.notify_all()
        return True

    def end(self) -> None:
        """End the run, and wake the groups that wait for labels."""
        with self._changed:
            self._ending.set()
            self._changed.notify_all()

    def _members(self) -> list[str]:
        return [group.name for group in self._recipe.groups if group.name not in self._store.dropped]

    def _combine_complete(self) -> None:
        for number in range(2 * self._recipe.mutual.cycles + 1):
            self._combine_if_complete(Phase(number))

    def _combine_if_complete(self, phase: Phase) -> None:
        members, posted = self._members(), self._store.posted(phase)
        if self._store.stored_labels(phase) is not None or not members or any(name not in posted for name in members):
            return
        weights = {group.name: group.weight for group in self._recipe.groups}
        scores = [self._store.scores(name, phase) for name in members]
        labels = combine(scores, [weights[name] for name in members], self._recipe.mutual, phase.kind == "bi")
        if phase.ends_cycle and self._should_stop(phase, members):
            self._store.stop_after(phase)
        self._store.store_labels(phase, members, labels)

    def _should_stop(self, phase: Phase, members: Sequence[str]) -> bool:
        """Return whether no formulation of any group had a new best dev score in the last `patience` cycles."""
        patience = self._recipe.mutual.patience
        if patience is None or phase.cycle <= patience:
            return False
        recent = phase.number - 2 * patience
        for name in members:
            for parity in (0, 1):
                scores = {
                    number: self._store.posted(Phase(number))[name]["dev"]
                    for number in range(1, phase.number + 1)
                    if number % 2 == parity and name in self._store.posted(Phase(number))
                }
                if max(scores, key=lambda number: (scores[number], -number)) > recent:
                    return False
        return True
