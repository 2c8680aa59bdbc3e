"""A group as the run sees it, and the plainest kind: in this process, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from distcse.errors import DistcseError, WorkFailedError
from distcse.events import Reporter
from distcse.experiments.mutual.label_exchange import RunEnded
from distcse.experiments.mutual.phase_store import Scores
from distcse.experiments.mutual.phase_trainer import GroupContext, PairScorer, PhaseResult, PhaseTrainer
from distcse.experiments.mutual.phases import Phase


class Group(Protocol):
    """One pre-trained language model and all that works for it."""

    name: str

    def prepare(self, phase: Phase) -> None:
        """Begin what a phase needs and its labels do not change; returns at once."""
        ...

    def train(self, phase: Phase, labels: Scores) -> PhaseResult | None:
        """Train a phase to its end; None when the run was asked to stop."""
        ...

    def score(self, phase: Phase) -> Scores:
        """Score all pairs with the best model of a phase.

        Raises:
            Ended: The run was asked to stop. The scores are made again when it is resumed.
        """
        ...

    def close(self) -> None:
        """Give back what the group holds."""
        ...


class LocalGroup:
    """In this process.

    Args:
        bench: The group's part of the run.
        reporter: Receives its events.
    """

    def __init__(self, bench: GroupContext, reporter: Reporter) -> None:
        self.name = bench.group.name
        self._reporter = reporter
        self._worker, self._scorer = PhaseTrainer(bench), PairScorer(bench)

    def prepare(self, phase: Phase) -> None:
        self._worker.prepare(phase)

    def train(self, phase: Phase, labels: Scores) -> PhaseResult | None:
        return self._worker.train(phase, labels, self._reporter)

    def score(self, phase: Phase) -> Scores:
        return self._scorer.score(phase, on_progress=self._end_if_asked)

    def _end_if_asked(self, done: int, total: int) -> None:
        if done < total and self._reporter.stop_requested():
            raise RunEnded

    def close(self) -> None:
        """Nothing is held."""


class SerializedGroup:
    """A group that works only when no other does: groups of one process share its cores and its random state.

    Args:
        group: Who works.
        turn: One for all groups.
        stop_requested: Whether the run was asked to stop. A group that has not had its turn by then does not begin.
    """

    def __init__(self, group: Group, turn: threading.Lock, stop_requested: Callable[[], bool] = lambda: False) -> None:
        self.name = group.name
        self._group, self._turn, self._stop_requested = group, turn, stop_requested

    def prepare(self, phase: Phase) -> None:
        with self._alone(phase):
            self._group.prepare(phase)

    def train(self, phase: Phase, labels: Scores) -> PhaseResult | None:
        with self._alone(phase):
            return self._group.train(phase, labels)

    def score(self, phase: Phase) -> Scores:
        with self._alone(phase):
            return self._group.score(phase)

    def close(self) -> None:
        self._group.close()

    @contextmanager
    def _alone(self, phase: Phase) -> Iterator[None]:
        """This group's turn. A failure that is no mistake of the user's carries its name, as it does on Ray."""
        with self._turn:
            if self._stop_requested():
                raise RunEnded
            try:
                yield
            except (DistcseError, RunEnded):
                raise
            except Exception as failed:
                told = str(failed).strip().splitlines()
                raise WorkFailedError(
                    f"group {self.name} failed in {phase.name}: {type(failed).__name__}{': ' + told[-1] if told else ''}"
                ) from failed
