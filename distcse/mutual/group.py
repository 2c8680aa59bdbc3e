"""A group as the run sees it, and the plainest kind: in this process, one at a time."""

from __future__ import annotations

import threading
from typing import Protocol

from distcse.events import Watch
from distcse.mutual.ledger import Scores
from distcse.mutual.phases import Phase
from distcse.mutual.work import Bench, Scorer, Trained, Worker


class Group(Protocol):
    """One pre-trained language model and all that works for it."""

    name: str

    def prepare(self, phase: Phase) -> None:
        """Begin what a phase needs and its labels do not change; returns at once."""
        ...

    def train(self, phase: Phase, labels: Scores) -> Trained | None:
        """Train a phase to its end; None when the run was asked to stop."""
        ...

    def score(self, phase: Phase) -> Scores:
        """Score all pairs with the best model of a phase."""
        ...

    def close(self) -> None:
        """Give back what the group holds."""
        ...


class GroupHere:
    """In this process. Groups take turns: they would share its cores and its random state.

    Args:
        bench: The group's part of the run.
        watch: Hears its events.
        turn: One for all groups of the process.
    """

    def __init__(self, bench: Bench, watch: Watch, turn: threading.Lock) -> None:
        self.name = bench.group.name
        self._watch, self._turn = watch, turn
        self._worker, self._scorer = Worker(bench), Scorer(bench)

    def prepare(self, phase: Phase) -> None:
        """Nothing ahead: another group may be at work."""

    def train(self, phase: Phase, labels: Scores) -> Trained | None:
        with self._turn:
            return self._worker.train(phase, labels, self._watch)

    def score(self, phase: Phase) -> Scores:
        with self._turn:
            return self._scorer.score(phase)

    def close(self) -> None:
        """Nothing is held."""
