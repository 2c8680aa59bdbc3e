"""Groups of workers: their interface, a group in this process, and the pool of slots that groups on a cluster can share.

A slot is what one worker reserves, usually a GPU (`mutual.shared_workers`). A group trains with any permitted number of workers,
because all of them split the same global batches, and can continue from a checkpoint with more. `allocate_workers` decides how
many each group has. While a group is between two phases nothing is decided, because what it will ask for is not known.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from distcse.devices import host
from distcse.errors import DistcseError, OutOfMemoryError, RunRecordError, StoppedEarlyError, WorkFailedError, last_line
from distcse.events import Event, GroupActivity, LogMessage, Reporter, StepReport, WaitWarning, WorkersAssigned
from distcse.recipe import KINDS
from distcse.runs.mutual.phase_store import GroupContext, Kind, Phase, PhaseResult, Scores, StoredScores
from distcse.runs.mutual.phase_trainer import PairScorer, PhaseTrainer, ScoringProgress
from distcse.runs.mutual.processes import count_parameters, worker_counts
from distcse.training.schedule import total_steps

T = TypeVar("T")

START_SLACK = 1.5
"""Factor by which a group may exceed the shortest time in which all can end. Growth corrects what turns out too
few."""
PAUSE_S = 20.0
"""Assumed seconds in which a group that changes its workers does not work: checkpoint, processes, process group."""
_POLL_S = 0.5
"""Seconds between checks for labels, nodes and a stop request while a group waits."""
_SECONDS_PER_PARAMETER = 4e-12
"""Assumed seconds of a pair's forward pass per parameter of a layer, until the first step of a group is measured. Until then only
ratios between groups matter."""
_TRAINING_PASSES = 3
"""Forward and backward pass of a training step over its forward pass."""


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


@dataclass(frozen=True)
class RemainingWork:
    """What a group has left to do until it has posted its scores."""

    group: str
    alone_s: float
    """Expected seconds with one worker; n workers take an n-th of them."""
    counts: Sequence[int]
    """Numbers of workers that the group can have, ascending."""
    workers: int = 0
    """Slots that the group holds, which it keeps; 0 if it waits to start."""

    def seconds(self, count: int, pause_s: float = 0.0) -> float:
        """Return the expected seconds with `count` workers, with the pause in which a group at work takes more of them."""
        return self.alone_s / count + (pause_s if self.workers not in (0, count) else 0.0)


def allocate_workers(work: Sequence[RemainingWork], slots: int, pause_s: float) -> dict[str, int]:
    """Decide the number of workers of each group from now on.

    Groups start in order of their length, each with the fewest workers that let it end with the others. Those that find no room
    run in a later wave. When none waits, free slots go to the group that would end last.

    Returns:
        The number by group: 0 for one that has to wait; what it holds, or more, for one at work.
    """
    allocated = {group.group: group.workers for group in work}
    free = slots - sum(allocated.values())
    counts = {each.group: [count for count in each.counts if count <= slots] or each.counts[:1] for each in work}
    shortest_s = max([sum(each.alone_s for each in work) / slots, *(e.seconds(counts[e.group][-1]) for e in work)])
    waiting = [group for group in work if not group.workers]
    for group in sorted(waiting, key=lambda group: group.seconds(group.counts[0]), reverse=True):
        ends = (count for count in counts[group.group] if group.seconds(count) <= START_SLACK * shortest_s)
        count = next(ends, counts[group.group][-1])
        if count <= free:
            allocated[group.group] = count
            free -= count
    growing = list(work) if all(allocated.values()) else []
    while free > 0 and growing:
        last = max(growing, key=lambda group: group.seconds(allocated[group.group], pause_s))
        held = allocated[last.group]
        larger = next((count for count in last.counts if held < count <= held + free), None)
        if larger is None or (last.workers and last.seconds(larger, pause_s) >= last.seconds(last.workers)):
            growing.remove(last)
            continue
        allocated[last.group] = larger
        free -= larger - held
    return allocated


@dataclass
class PoolMember:
    """A group in the pool, and what it is doing."""

    counts: Sequence[int]
    """Numbers of training workers that it can have, ascending. It scores with any number from the first to the last."""
    steps: Mapping[Kind, int]
    """Training steps of a phase by formulation."""
    batch_sizes: Mapping[Kind, int]
    pairs: int
    parameters: float
    """Number of parameters of its model's layers, in proportion to which passes take until they are measured."""
    pass_s: float | None = None
    """Measured seconds of a pair's forward pass with one worker."""
    stage: Literal["between phases", "waiting", "training", "scoring"] = "between phases"
    phase: Phase = field(default_factory=lambda: Phase(0))
    has_labels: Callable[[], bool] = lambda: False
    slots: list[int] = field(default_factory=list)
    """Slots that are reserved for it."""
    workers: int = 0
    """Number of them that it uses."""
    done_steps: int = 0

    @property
    def can_work(self) -> bool:
        """Whether it is at work, or waits for nothing but slots."""
        return self.stage in ("training", "scoring") or (self.stage == "waiting" and self.has_labels())

    @property
    def step_passes(self) -> int:
        """Forward passes of a pair that take as long as a training step of the phase."""
        return _TRAINING_PASSES * self.batch_sizes[self.phase.kind]

    @property
    def passes(self) -> int:
        """Forward passes of a pair that take as long as the rest of the phase."""
        trains = self.phase.number > 0 and self.stage != "scoring"
        return self.pairs + trains * (self.steps[self.phase.kind] - self.done_steps) * self.step_passes


def pool_members(contexts: Sequence[GroupContext], slots: int) -> dict[str, PoolMember]:
    """Return the groups by name. A model whose size is not known counts as the mean of the others."""
    sizes = [count_parameters(context.group) for context in contexts]
    known = [size for size in sizes if size is not None] or [1]
    pairs, members = len(contexts[0].pairs), dict[str, PoolMember]()
    for context, size in zip(contexts, sizes, strict=True):
        loops = {kind: context.recipe.loop_of(context.group, kind) for kind in KINDS}
        rows = {"bi": pairs, "cross": pairs * (2 if context.recipe.cross_of(context.group).both_orders else 1)}
        members[context.group.name] = PoolMember(
            worker_counts(context.group.rng_streams, slots, context.group.workers),
            {kind: total_steps(loop, max(1, rows[kind] // loop.batch_size)) for kind, loop in loops.items()},
            {kind: loop.batch_size for kind, loop in loops.items()},
            pairs,
            size or sum(known) / len(known),
        )
    return members


class WorkerPool:
    """Slots that groups share. Thread-safe: each group runs in a thread.

    Args:
        members: The groups, by name.
        usable: Returns the numbers of the slots whose nodes are alive, those of one node next to each other.
        clock: Returns seconds, for the warning of a long wait. Default: the time.
    """

    def __init__(
        self,
        members: Mapping[str, PoolMember],
        usable: Callable[[], Sequence[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = dict(members)
        self._usable, self._clock = usable, clock
        self._seconds_per_parameter = _SECONDS_PER_PARAMETER
        self._changed = threading.Condition()

    def observed(self, group: str, reporter: Reporter) -> Reporter:
        """Return a reporter for a group's workers that also measures their training steps."""

        def emit(event: Event) -> None:
            if isinstance(event, StepReport):
                self.measure_steps(group, event.step, event.seconds)
            reporter.emit(event)

        return Reporter(emit, reporter.stop_requested)

    def acquire(self, group: str, phase: Phase, has_labels: Callable[[], bool], reporter: Reporter) -> list[int]:
        """Wait until a group can begin a phase, and return its slots."""
        with self._changed:
            member = self._members[group]
            member.phase, member.has_labels, member.done_steps = phase, has_labels, 0
            return self._wait_for_slots(member, "training" if phase.number else "scoring", reporter)

    def wants_more(self, group: str) -> bool:
        """Return whether slots are reserved for a group that its workers do not use yet."""
        member = self._members[group]
        return len(member.slots) > member.workers

    def grow(self, group: str) -> list[int]:
        """Return all slots of a group that trains, those that it uses already first."""
        with self._changed:
            return self._begin(self._members[group], "training")

    def exchange(self, group: str, reporter: Reporter) -> list[int]:
        """Take back the slots of a group at work, of which one is or will be lost, and wait for others as `acquire` does."""
        with self._changed:
            member = self._members[group]
            assert member.stage == "training" or member.stage == "scoring"
            stage, member.slots, member.workers = member.stage, [], 0
            return self._wait_for_slots(member, stage, reporter)

    def begin_scoring(self, group: str) -> list[int]:
        """Return the slots of a group that has trained, with those that are free and shorten its scoring."""
        with self._changed:
            member = self._members[group]
            self._begin(member, "scoring")
            self._allocate(begins_scoring=member)
            return self._begin(member, "scoring")

    def release(self, group: str) -> None:
        """Take back the slots of a group that has scored. They are given away once it waits for its next phase, or leaves."""
        with self._changed:
            member = self._members[group]
            member.stage, member.slots, member.workers = "between phases", [], 0

    def leave(self, group: str) -> None:
        """Continue without a group, which has finished or failed."""
        with self._changed:
            self._members.pop(group, None)
            self._changed.notify_all()

    def measure_steps(self, group: str, step: int, seconds: float) -> None:
        """Record the number of a group's training steps so far, and the mean wall time of its recent ones."""
        with self._changed:
            member = self._members.get(group)
            if member is not None and member.stage == "training":
                member.done_steps, member.pass_s = step, seconds * member.workers / member.step_passes
                self._seconds_per_parameter = member.pass_s / member.parameters
                self._allocate()

    def _wait_for_slots(
        self, member: PoolMember, stage: Literal["training", "scoring"], reporter: Reporter
    ) -> list[int]:
        """Wait until a group has slots, and let it begin with them. Called with the lock held."""
        member.stage = "waiting"
        warning, is_reported = WaitWarning(reporter, clock=self._clock), False
        while True:
            # Polled: a signal handler sets the stop flag, and nodes come and go, without notifying the condition.
            reporter.check_stop("while a group waited for workers")
            self._allocate()
            if member.slots:
                return self._begin(member, stage)
            if member.has_labels() and not is_reported:
                is_reported = True
                reporter.emit(GroupActivity(member.phase.name, "waiting", phase_index=member.phase.number))
            if not self._usable():
                warning.check("waiting for nodes with room for a shared worker")
            self._changed.wait(_POLL_S)

    def _begin(self, member: PoolMember, stage: Literal["training", "scoring"]) -> list[int]:
        """Let a group use all slots that are reserved for it, and return them."""
        member.stage, member.workers = stage, len(member.slots)
        return list(member.slots)

    def _allocate(self, begins_scoring: PoolMember | None = None) -> None:
        """Reserve free slots for groups that can work; a group that begins to score can take any number of them."""
        if any(member.stage == "between phases" for member in self._members.values()):
            return
        held = {slot for member in self._members.values() for slot in member.slots}
        usable = self._usable()
        free = [slot for slot in usable if slot not in held]
        if not free:
            return
        working = {name: member for name, member in self._members.items() if member.can_work}
        work = [self.remaining(name, member, member is begins_scoring) for name, member in working.items()]
        for name, count in allocate_workers(work, len(held.union(usable)), PAUSE_S).items():
            member = working[name]
            added = count - len(member.slots)
            member.slots += free[:added]
            del free[:added]
        self._changed.notify_all()

    def remaining(self, name: str, member: PoolMember, begins_scoring: bool) -> RemainingWork:
        """Return what a group has left to do, and the numbers of workers that it can do it with."""
        held, counts = len(member.slots), member.counts
        if begins_scoring or not member.phase.number:
            counts = range(counts[0], counts[-1] + 1)
        if member.stage == "scoring" and not begins_scoring:
            counts = [held]  # its parts are fixed
        pass_s = member.pass_s or member.parameters * self._seconds_per_parameter
        return RemainingWork(name, pass_s * member.passes, sorted({*counts, *([held] if held else [])}), held)


class SlotsLost(Exception):
    """A group cannot continue in its slots, because the node of one was lost."""


class ResizableGroup(Group):
    """The workers of a group on slots of a pool."""

    @abstractmethod
    def use(self, slots: Sequence[int]) -> None:
        """Work on these slots from now on, and end the workers on others. Called between two trainings or scorings."""

    @abstractmethod
    def train(
        self, phase: Phase, labels: StoredScores, should_pause: Callable[[], bool] = lambda: False
    ) -> PhaseResult | None:
        """Train as `Group.train` does; also return None, after a checkpoint, when `should_pause` is true or a slot will be lost.

        Raises:
            SlotsLost: A slot was lost. `score` raises it too.
        """


class PooledGroup(Group):
    """A group that takes its workers from a pool: it has none while it waits for labels (see `Group`)."""

    def __init__(self, group: ResizableGroup, pool: WorkerPool, reporter: Reporter) -> None:
        self.name = group.name
        self._group, self._pool, self._reporter = group, pool, reporter
        self._workers = 0

    def acquire(self, phase: Phase, has_labels: Callable[[], bool]) -> None:
        self._use(self._pool.acquire(self.name, phase, has_labels, self._reporter))

    def train(self, phase: Phase, labels: StoredScores) -> PhaseResult | None:
        while True:
            try:
                trained = self._group.train(phase, labels, partial(self._pool.wants_more, self.name))
            except SlotsLost:
                self._exchange(phase, "training", is_lost=True)
                continue
            if trained is not None or self._reporter.stop_requested():
                return trained
            if self._pool.wants_more(self.name):
                self._use(self._pool.grow(self.name), phase)
            else:
                self._exchange(phase, "training")

    def score(self, phase: Phase) -> Scores:
        self._use(self._pool.begin_scoring(self.name))
        while True:
            try:
                return self._group.score(phase)
            except SlotsLost:
                self._exchange(phase, "scoring", is_lost=True)

    def release(self) -> None:
        self._use([])  # ends the workers before others start on their slots
        self._pool.release(self.name)

    def close(self) -> None:
        self._group.close()
        self._report(0)
        self._pool.leave(self.name)

    def _exchange(self, phase: Phase, activity: str, is_lost: bool = False) -> None:
        """Release all slots, of which one was or will be lost, and continue in others."""
        if is_lost:
            self._reporter.warn(f"lost a node in {phase.name}; other shared workers continue")
        self._use([])
        slots = self._pool.exchange(self.name, self._reporter)
        self._reporter.emit(GroupActivity(phase.name, activity, phase_index=phase.number))  # after that of the wait
        self._use(slots, phase)

    def _use(self, slots: Sequence[int], continued: Phase | None = None) -> None:
        if continued is not None:
            self._reporter.emit(LogMessage(f"continuing {continued.name} with {len(slots)} workers"))
        self._group.use(slots)
        self._report(len(slots))

    def _report(self, workers: int) -> None:
        if workers != self._workers:
            self._workers = workers
            self._reporter.emit(WorkersAssigned(workers))
