"""The interface of a group of workers, and its implementation in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from distcse.errors import DistcseError, StoppedEarlyError, WorkFailedError
from distcse.events import Reporter
from distcse.experiments.mutual.phase_trainer import GroupContext, PhaseResult, PhaseTrainer
from distcse.experiments.mutual.phases import Phase
from distcse.experiments.mutual.scoring import PairScorer, ScoringProgress
from distcse.experiments.mutual.step_passes import StepPasses
from distcse.experiments.mutual.stored_scores import Scores, StoredScores
from distcse.trainer import allocator


class Group(Protocol):
    """The workers of one pretrained language model."""

    name: str

    def prepare(self, phase: Phase) -> None:
        """Start preparing what a phase needs before its labels are available. May return before that has finished."""
        ...

    def acquire(self, phase: Phase, has_labels: Callable[[], bool]) -> None:
        """Wait for a phase's labels and workers, if the group shares workers with others. Others return at once.

        Args:
            phase: The phase.
            has_labels: Returns whether the phase's labels are available.

        Raises:
            StoppedEarlyError: The run was asked to stop.
        """
        ...

    def train(self, phase: Phase, labels: StoredScores) -> PhaseResult | None:
        """Train the model of a phase on labels; None if the run was asked to stop."""
        ...

    def score(self, phase: Phase) -> Scores:
        """Score all n pairs with the best model of a phase.

        Raises:
            StoppedEarlyError: The run was asked to stop. A resumed run scores the shards that are not stored.
        """
        ...

    def release(self) -> None:
        """Give shared workers back after a phase. Workers that it does not share remain."""
        ...

    def close(self) -> None:
        """Release all of the group's resources. May be called again."""
        ...


class LocalGroup:
    """A group in this process.

    Args:
        context: The group's part of the run.
        reporter: Receives the group's events.
    """

    def __init__(self, context: GroupContext, reporter: Reporter) -> None:
        self.name = context.group.name
        self._reporter = reporter
        self._trainer, self._scorer = PhaseTrainer(context), PairScorer(context)
        self._passes = StepPasses(context)

    def prepare(self, phase: Phase) -> None:
        self._trainer.prepare(phase)

    def acquire(self, phase: Phase, has_labels: Callable[[], bool]) -> None:
        """Do nothing: the group shares no workers."""

    def train(self, phase: Phase, labels: StoredScores) -> PhaseResult | None:
        def train(passes: int) -> PhaseResult | None:
            return self._trainer.train(phase, labels, self._reporter, passes)

        return self._passes.fit(phase, train, allocator.release_memory, self._reporter)

    def score(self, phase: Phase) -> Scores:
        progress = ScoringProgress(self._reporter)

        def on_progress(done: int, total: int) -> None:
            if done == total or progress.is_due:
                progress.report(done, total)
            if done < total:
                self._reporter.check_stop(f"after {done:,} of {total:,} pairs were scored")

        return self._scorer.score(phase, on_progress=on_progress)

    def release(self) -> None:
        """Do nothing: the group shares no workers."""

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


class SerializedGroup:
    """A group that works only while no other does: groups in one process share its cores and global random state.

    Args:
        group: The wrapped group.
        lock: One lock for all groups.
        stop_requested: Returns whether the run was asked to stop. A group that gets the lock afterwards does not start.
    """

    def __init__(self, group: Group, lock: threading.Lock, stop_requested: Callable[[], bool] = lambda: False) -> None:
        self.name = group.name
        self._group, self._lock, self._stop_requested = group, lock, stop_requested

    def prepare(self, phase: Phase) -> None:
        with self._exclusive(phase):
            self._group.prepare(phase)

    def acquire(self, phase: Phase, has_labels: Callable[[], bool]) -> None:
        self._group.acquire(phase, has_labels)

    def train(self, phase: Phase, labels: StoredScores) -> PhaseResult | None:
        with self._exclusive(phase):
            return self._group.train(phase, labels)

    def score(self, phase: Phase) -> Scores:
        with self._exclusive(phase):
            return self._group.score(phase)

    def release(self) -> None:
        self._group.release()

    def close(self) -> None:
        self._group.close()

    @contextmanager
    def _exclusive(self, phase: Phase) -> Iterator[None]:
        """Hold the lock. An unexpected exception becomes a `WorkFailedError` that names the group, as on Ray."""
        with self._lock:
            if self._stop_requested():
                raise StoppedEarlyError(f"stopped before {phase.name} of {self.name}")
            try:
                yield
            except DistcseError:
                raise
            except Exception as failed:
                lines = str(failed).strip().splitlines()
                raise WorkFailedError(
                    f"group {self.name} failed in {phase.name}: {type(failed).__name__}{': ' + lines[-1] if lines else ''}"
                ) from failed
