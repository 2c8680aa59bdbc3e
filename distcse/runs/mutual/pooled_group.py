"""A group whose workers are slots of a pool: it has some while it trains and scores, and none while it waits for labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from distcse.events import GroupActivity, LogMessage, Reporter, WorkersAssigned
from distcse.runs.mutual.phase_store import Scores, StoredScores
from distcse.runs.mutual.phases import Phase, PhaseResult
from distcse.runs.mutual.worker_pool import WorkerPool


class SlotsLost(Exception):
    """A group cannot continue in its slots, because the node of one was lost."""


class ResizableGroup(Protocol):
    """The workers of a group on slots of a pool."""

    name: str

    def use(self, slots: Sequence[int]) -> None:
        """Work on these slots from now on, and end the workers on others. Called between two trainings or scorings."""
        ...

    def train(
        self, phase: Phase, labels: StoredScores, should_pause: Callable[[], bool] = lambda: False
    ) -> PhaseResult | None:
        """Train as `Group.train` does; also return None, after a checkpoint, soon after `should_pause` returns true.

        Returns None, too, when one of its slots will be lost.

        Raises:
            SlotsLost: One of its slots was lost.
        """
        ...

    def score(self, phase: Phase) -> Scores:
        """See `Group.score`; raises `SlotsLost` as `train` does."""
        ...

    def close(self) -> None:
        """See `Group.close`."""
        ...


class PooledGroup:
    """A group that takes its workers from a pool (see `Group`).

    Args:
        group: Its workers.
        pool: The pool.
        reporter: Receives the group's events.
    """

    def __init__(self, group: ResizableGroup, pool: WorkerPool, reporter: Reporter) -> None:
        self.name = group.name
        self._group, self._pool, self._reporter = group, pool, reporter
        self._workers = 0

    def prepare(self, phase: Phase) -> None:
        """Do nothing: the group has no workers yet."""

    def acquire(self, phase: Phase, has_labels: Callable[[], bool]) -> None:
        self._use(self._pool.acquire(self.name, phase, has_labels, self._reporter))

    def train(self, phase: Phase, labels: StoredScores) -> PhaseResult | None:
        while True:
            try:
                trained = self._group.train(phase, labels, partial(self._pool.wants_more, self.name))
            except SlotsLost:
                self._exchange_lost(phase, "training")
                continue
            if trained is not None or self._reporter.stop_requested():
                return trained
            if self._pool.wants_more(self.name):
                self._continue(phase, self._pool.grow(self.name))
            else:  # a node of its slots will be lost
                self._exchange(phase, "training")

    def score(self, phase: Phase) -> Scores:
        self._use(self._pool.begin_scoring(self.name))
        while True:
            try:
                return self._group.score(phase)
            except SlotsLost:
                self._exchange_lost(phase, "scoring")

    def release(self) -> None:
        self._use([])  # ends the workers before others start on their slots
        self._pool.release(self.name)

    def close(self) -> None:
        self._group.close()
        self._report(0)
        self._pool.leave(self.name)

    def _exchange_lost(self, phase: Phase, activity: str) -> None:
        self._reporter.emit(LogMessage(f"lost a node in {phase.name}; other shared workers continue", warning=True))
        self._exchange(phase, activity)

    def _exchange(self, phase: Phase, activity: str) -> None:
        """Release all slots, and wait for others."""
        self._use([])
        slots = self._pool.exchange(self.name, self._reporter)
        self._reporter.emit(GroupActivity(phase.name, activity, phase_index=phase.number))  # after that of the wait
        self._continue(phase, slots)

    def _continue(self, phase: Phase, slots: Sequence[int]) -> None:
        self._reporter.emit(LogMessage(f"continuing {phase.name} with {len(slots)} workers"))
        self._use(slots)

    def _use(self, slots: Sequence[int]) -> None:
        self._group.use(slots)
        self._report(len(slots))

    def _report(self, workers: int) -> None:
        if workers != self._workers:
            self._workers = workers
            self._reporter.emit(WorkersAssigned(workers))
