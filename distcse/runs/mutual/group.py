"""The interface of a group of workers, and its implementation in this process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from distcse.devices import host
from distcse.errors import DistcseError, OutOfMemoryError, RunRecordError, StoppedEarlyError, WorkFailedError, last_line
from distcse.events import Reporter
from distcse.runs.mutual.phase_store import GroupContext, Phase, PhaseResult, Scores, StoredScores
from distcse.runs.mutual.phase_trainer import PairScorer, PhaseTrainer, ScoringProgress

T = TypeVar("T")


class Group(ABC):
    """The workers of one pretrained language model."""

    name: str

    def prepare(self, phase: Phase) -> None:  # noqa: B027  (optional)
        """Start preparing what a phase needs before its labels are available. May return before that has finished."""

    def acquire(self, phase: Phase, has_labels: Callable[[], bool]) -> None:  # noqa: B027  (optional)
        """Wait until `has_labels`, and for workers, if the group shares workers with others. Others return at once."""

    @abstractmethod
    def train(self, phase: Phase, labels: StoredScores) -> PhaseResult | None:
        """Train the model of a phase on labels; None if the run was asked to stop."""

    @abstractmethod
    def score(self, phase: Phase) -> Scores:
        """Score all n pairs with the best model of a phase."""

    def release(self) -> None:  # noqa: B027  (optional)
        """Release shared workers after a phase. Workers that it does not share remain."""

    def close(self) -> None:  # noqa: B027  (optional)
        """Release all of the group's resources. May be called again."""


class LocalGroup(Group):
    """A group in this process. It works only while no other does: groups share the cores and the global random state.

    Args:
        context: The group's part of the run.
        reporter: Receives its events.
        turn: One lock for all groups. A group that gets it after a stop request does not start.
    """

    def __init__(self, context: GroupContext, reporter: Reporter, turn: threading.Lock) -> None:
        self.name = context.group.name
        self._reporter, self._turn = reporter, turn
        self._trainer, self._scorer = PhaseTrainer(context), PairScorer(context)
        self._passes = StepPasses(context)

    def prepare(self, phase: Phase) -> None:
        with self._exclusive(phase):
            self._trainer.prepare(phase)

    def train(self, phase: Phase, labels: StoredScores) -> PhaseResult | None:
        def train(passes: int) -> PhaseResult | None:
            return self._trainer.train(phase, labels, self._reporter, passes)

        with self._exclusive(phase):
            return self._passes.fit(phase, train, host.release_memory, self._reporter)

    def score(self, phase: Phase) -> Scores:
        progress = ScoringProgress(self._reporter)

        def on_progress(done: int, total: int) -> None:
            if done == total or progress.is_due:
                progress.report(done, total)
            if done < total:
                self._reporter.check_stop(f"after {done:,} of {total:,} pairs were scored")

        with self._exclusive(phase):
            return self._scorer.score(phase, on_progress=on_progress)

    @contextmanager
    def _exclusive(self, phase: Phase) -> Iterator[None]:
        """Hold the lock. An unexpected exception becomes a `WorkFailedError` that names the group, as on Ray."""
        with self._turn:
            if self._reporter.stop_requested():
                raise StoppedEarlyError(f"stopped before {phase.name} of {self.name}")
            try:
                yield
            except DistcseError:
                raise
            except Exception as failed:
                raise WorkFailedError(
                    f"group {self.name} failed in {phase.name}: {type(failed).__name__}: {last_line(failed)}"
                ) from failed


class StepPasses:
    """Passes per step for each formulation, kept in the run's folder, so that a resumed run does not run out of memory again.

    Raises:
        RunRecordError: The stored numbers are damaged.
    """

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._run, self._file = context.run, f"memory/{context.group.name}.json"
        try:
            self._passes: dict[str, int] = self._run.read_json(self._file) or {}
        except (OSError, ValueError) as broken:
            raise RunRecordError(
                f"{self._run}/{self._file} cannot be read: {broken}; delete it, and --resume"
            ) from None

    def fit(self, phase: Phase, train: Callable[[int], T], release: Callable[[], None], reporter: Reporter) -> T:
        """Train, and repeat it with half as many pairs per pass each time that it runs out of memory.

        Args:
            phase: The phase.
            train: Trains its model from the last checkpoint, with this number of passes per step and random stream.
            release: Called before a repetition, to free what the failed training holds.
            reporter: Receives a warning before each repetition.
        """
        while True:
            passes = self._passes.get(phase.kind, 1)
            try:
                return train(passes)
            except OutOfMemoryError:
                passes *= 2
                pairs = self._context.section(phase.kind).batch_size // self._context.group.rng_streams
                if passes > pairs:
                    raise
            self._passes[phase.kind] = passes
            self._run.write_json(self._file, self._passes)
            reporter.warn(
                f"out of memory in {phase.name}; continuing from the last checkpoint with at most {-(-pairs // passes)} of "
                f"{pairs} pairs per forward pass: the same batches, one more forward pass"
            )
            release()  # after the handler: the error's traceback refers to the training
