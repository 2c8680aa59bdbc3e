"""The interface of a group of workers, and its implementation in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar, runtime_checkable

from distcse.devices import host
from distcse.errors import DistcseError, OutOfMemoryError, RunRecordError, StoppedEarlyError, WorkFailedError
from distcse.events import LogMessage, Reporter
from distcse.runs.backend import Backend
from distcse.runs.mutual.phase_store import Scores, StoredScores
from distcse.runs.mutual.phase_trainer import PhaseTrainer
from distcse.runs.mutual.phases import GroupContext, Kind, Phase, PhaseResult
from distcse.runs.mutual.processes import GroupResources
from distcse.runs.mutual.scoring import PairScorer, ScoringProgress


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


@runtime_checkable
class GroupBackend(Protocol):
    """A backend with workers for groups."""

    def open_groups(
        self, contexts: Sequence[GroupContext], reporters: Sequence[Reporter], resources: GroupResources
    ) -> AbstractContextManager[list[Group]]:
        """Start the groups of a mutual distillation, and close them at the end of the block.

        Args:
            contexts: Each group's part of the run.
            reporters: Receive each group's events.
            resources: What their workers reserve.
        """
        ...


class LocalGroup:
    """A group in this process."""

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

        return self._passes.fit(phase, train, host.release_memory, self._reporter)

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


def open_groups(
    backend: Backend, contexts: Sequence[GroupContext], reporters: Sequence[Reporter], resources: GroupResources
) -> AbstractContextManager[list[Group]]:
    """Start the groups on a backend that has workers for them, or else in this process; see `GroupBackend.open_groups`."""
    if isinstance(backend, GroupBackend):
        return backend.open_groups(contexts, reporters, resources)
    turn = threading.Lock()
    opened = zip(contexts, reporters, strict=True)
    return nullcontext([SerializedGroup(LocalGroup(*each), turn, each[1].stop_requested) for each in opened])


T = TypeVar("T")


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

    def of(self, kind: Kind) -> int:
        """Return the number of passes per training step and random stream of a formulation."""
        return self._passes.get(kind, 1)

    def fit(self, phase: Phase, train: Callable[[int], T], release: Callable[[], None], reporter: Reporter) -> T:
        """Train, and repeat it with half as many pairs per pass each time that it runs out of memory.

        Args:
            phase: The phase.
            train: Trains its model from the last checkpoint, with this number of passes per step.
            release: Called before a repetition, to free what the failed training holds.
            reporter: Receives a warning before each repetition.

        Returns:
            What `train` returned.

        Raises:
            OutOfMemoryError: A pass had one pair only.
        """
        while True:
            try:
                return train(self.of(phase.kind))
            except OutOfMemoryError as problem:
                self._double(phase, problem, reporter)
            release()  # after the handler: the error's traceback refers to the training

    def _double(self, phase: Phase, problem: OutOfMemoryError, reporter: Reporter) -> None:
        passes = 2 * self.of(phase.kind)
        pairs = self._context.section(phase.kind).batch_size // self._context.group.rng_streams
        if passes > pairs:
            raise problem
        self._passes[phase.kind] = passes
        self._run.write_json(self._file, self._passes)
        reporter.emit(
            LogMessage(
                f"out of memory in {phase.name}; continuing from the last checkpoint with at most {-(-pairs // passes)} of "
                f"{pairs} pairs per forward pass: the same batches, one more forward pass",
                warning=True,
            )
        )
