"""Where the groups meet: each posts its scores and goes on when the labels are there. Scores alone cross between groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from distcse.experiments.mutual.labels import combine
from distcse.experiments.mutual.phase_store import PhaseStore, Scores
from distcse.experiments.mutual.phase_trainer import PhaseResult
from distcse.experiments.mutual.phases import Phase
from distcse.recipe import MutualRecipe

_LOOK = 0.5
"""Seconds between two looks for a stop wish while a group waits."""


class RunEnded(Exception):
    """A group's work ends early without an error: the run was asked to stop, or another group failed."""


class LabelExchange:
    """A meeting point of threads, one a group, over the run's ledger.

    Args:
        recipe: How scores are combined, and when cycles end.
        ledger: Where everything posted is kept.
        ending: Set when nothing follows, for whatever reason; groups that train see it and stop with a checkpoint.
        stop_requested: Whether the run was asked to stop. Polled while a group waits.
    """

    def __init__(
        self,
        recipe: MutualRecipe,
        ledger: PhaseStore,
        ending: threading.Event,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._recipe = recipe
        self._ledger = ledger
        self._ending = ending
        self._stop_requested = stop_requested
        self._changed = threading.Condition()
        self._agree_where_due()  # a driver may have been killed after the last scores came, before their labels were made

    def post(self, group: str, phase: Phase, scores: Scores, trained: PhaseResult | None) -> None:
        """A group's scores of a phase. Those of the last group make the labels."""
        with self._changed:
            self._ledger.post(group, phase, scores, trained)
            self._agree(phase)
            self._changed.notify_all()

    def missing(self, phase: Phase) -> list[str]:
        """Groups whose scores of a phase are waited for."""
        with self._changed:
            there = self._ledger.posted(phase)
            return [name for name in self._members() if name not in there]

    def labels(self, phase: Phase) -> Scores | None:
        """The labels of a phase, once all groups posted; None where no phase follows it.

        Raises:
            Ended: The run was asked to stop, or another group failed.
        """
        with self._changed:
            while True:
                # Polled: a stop wish is a flag that a signal handler sets, and nobody notifies the condition then.
                if self._ending.is_set() or self._stop_requested():
                    raise RunEnded
                if (labels := self._ledger.labels(phase)) is not None:
                    stopped = self._ledger.stopped_after
                    return None if stopped is not None and stopped <= phase else labels
                self._changed.wait(_LOOK)

    def drop(self, group: str, why: str) -> bool:
        """Go on without a group; labels that waited for it alone are made of what is there.

        The last one is not dropped, and none in a run that ends: groups that are closed fail for no fault of theirs.
        """
        with self._changed:
            if self._members() == [group] or self._ending.is_set():
                return False
            self._ledger.drop(group, why)
            self._agree_where_due()
            self._changed.notify_all()
        return True

    def end(self) -> None:
        """Wake all who wait: nothing follows."""
        with self._changed:
            self._ending.set()
            self._changed.notify_all()

    def _members(self) -> list[str]:
        return [group.name for group in self._recipe.groups if group.name not in self._ledger.dropped]

    def _agree_where_due(self) -> None:
        for number in range(2 * self._recipe.mutual.cycles + 1):
            self._agree(Phase(number))

    def _agree(self, phase: Phase) -> None:
        members, there = self._members(), self._ledger.posted(phase)
        if self._ledger.labels(phase) is not None or not members or any(name not in there for name in members):
            return
        weights = {group.name: group.weight for group in self._recipe.groups}
        scores = [self._ledger.scores(name, phase) for name in members]
        labels = combine(scores, [weights[name] for name in members], self._recipe.mutual, phase.kind == "bi")
        if phase.ends_cycle and self._is_enough(phase, members):
            self._ledger.stop(phase)
        self._ledger.agree(phase, members, labels)

    def _is_enough(self, phase: Phase, members: Sequence[str]) -> bool:
        """Whether no formulation of any group had a new best in the last `patience` cycles."""
        patience = self._recipe.mutual.patience
        if patience is None or phase.cycle <= patience:
            return False
        recent = phase.number - 2 * patience
        for name in members:
            for parity in (0, 1):
                scores = {
                    number: self._ledger.posted(Phase(number))[name]["dev"]
                    for number in range(1, phase.number + 1)
                    if number % 2 == parity and name in self._ledger.posted(Phase(number))
                }
                if max(scores, key=lambda number: (scores[number], -number)) > recent:
                    return False
        return True
