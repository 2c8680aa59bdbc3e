"""Gives the groups of a mutual distillation slots of one pool for each phase (`mutual.shared_workers`).

A slot is what one worker reserves, usually a GPU. `allocate_workers` decides how many a group has, by what all groups have left
to do. While a group is between two phases nothing is decided, because what it will ask for is not known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from distcse.events import Event, GroupActivity, Reporter, StepReport, WaitWarning
from distcse.recipe import KINDS, GroupSection, LoopSection, MutualRecipe
from distcse.runs.mutual.phases import GroupContext, Kind, Phase
from distcse.runs.mutual.processes import Parameters, count_parameters
from distcse.runs.mutual.scheduling import RemainingWork, StepTimes, allocate_workers, worker_counts
from distcse.training.schedule import total_steps

_POLL_S = 0.5
"""Seconds between checks for labels, nodes and a stop request while a group waits."""
FIRST_PAUSE_S = 20.0
"""Assumed seconds in which workers start, until they are measured."""


@dataclass
class PoolMember:
    """A group in the pool, and what it is doing.

    Attributes:
        costs: Expected seconds of its phases.
        counts: Numbers of training workers that it can have, ascending. It scores with any number from the first to the last.
    """

    costs: PhaseCosts
    counts: Sequence[int]
    stage: Literal["between phases", "waiting", "training", "scoring"] = "between phases"
    phase: Phase = field(default_factory=lambda: Phase(0))
    has_labels: Callable[[], bool] = lambda: False
    slots: list[int] = field(default_factory=list)
    """Slots that are reserved for it."""
    workers: int = 0
    """Number of them that it uses."""
    done_steps: int = 0
    began_at: float = 0.0
    """When it began to train or score with this number of workers."""
    is_starting: bool = False
    """Whether its workers have not reported a step yet."""
    was_interrupted: bool = False
    """Whether it scores for the second time in its phase, and so without what it had scored."""

    @property
    def can_work(self) -> bool:
        """Whether it is at work, or waits for nothing but slots."""
        return self.stage in ("training", "scoring") or (self.stage == "waiting" and self.has_labels())


class WorkerPool:
    """Slots that groups share. Thread-safe: each group runs in a thread.

    Args:
        members: The groups, by name.
        usable: Returns the numbers of the slots whose nodes are alive, those of one node next to each other.
        clock: Returns seconds. Default: the time.
    """

    def __init__(
        self,
        members: Mapping[str, PoolMember],
        usable: Callable[[], Sequence[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = dict(members)
        self._usable, self._clock = usable, clock
        self.pause_s = FIRST_PAUSE_S
        """Expected seconds in which workers start."""
        self._changed = threading.Condition()

    def observed(self, group: str, reporter: Reporter) -> Reporter:
        """Return a reporter for a group's workers that also measures their training steps."""

        def emit(event: Event) -> None:
            if isinstance(event, StepReport):
                self.measure_steps(group, event.step, event.seconds)
            reporter.emit(event)

        return Reporter(emit, reporter.stop_requested)

    def acquire(self, group: str, phase: Phase, has_labels: Callable[[], bool], reporter: Reporter) -> list[int]:
        """Wait until a group can begin a phase, and return its slots.

        Args:
            group: The group's name.
            phase: The phase.
            has_labels: Returns whether the phase's labels are available.
            reporter: Receives what the group waits for; its stop request ends the wait.

        Raises:
            StoppedEarlyError: The run was asked to stop.
        """
        with self._changed:
            member = self._members[group]
            member.phase, member.has_labels = phase, has_labels
            member.done_steps, member.was_interrupted = 0, False
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
        """Take back the slots of a group at work, of which one is or will be lost, and wait for others as `acquire` does.

        Raises:
            StoppedEarlyError: The run was asked to stop.
        """
        with self._changed:
            member = self._members[group]
            assert member.stage == "training" or member.stage == "scoring"
            stage, member.slots, member.workers = member.stage, [], 0
            member.was_interrupted = stage == "scoring"
            return self._wait_for_slots(member, stage, reporter)

    def begin_scoring(self, group: str) -> list[int]:
        """Return the slots of a group that has trained, with those that are free and shorten its scoring."""
        with self._changed:
            member = self._members[group]
            slots = self._begin(member, "scoring")
            self._allocate(begins_scoring=member)
            return self._begin(member, "scoring") if len(member.slots) > len(slots) else slots

    def release(self, group: str) -> None:
        """Take back the slots of a group that has scored. They are given away once it waits for its next phase, or leaves."""
        with self._changed:
            member = self._members[group]
            if not member.was_interrupted:
                elapsed_s = self._clock() - member.began_at
                pause_s = 0.0 if member.phase.number else self.pause_s  # scorers start together with trainers
                member.costs.measure_scores(member.phase, member.workers, max(elapsed_s - pause_s, elapsed_s / 10))
            member.stage, member.slots, member.workers = "between phases", [], 0

    def leave(self, group: str) -> None:
        """Continue without a group, which has finished or failed."""
        with self._changed:
            self._members.pop(group, None)
            self._changed.notify_all()

    def measure_steps(self, group: str, step: int, seconds: float) -> None:
        """Record training steps of a group.

        Args:
            group: The group's name.
            step: Number of its steps so far.
            seconds: Mean wall time of its recent steps.
        """
        with self._changed:
            member = self._members.get(group)
            if member is None or member.stage != "training":
                return
            repeats = step <= member.done_steps  # from a checkpoint before a loss, and how many is unknown
            if member.is_starting and not repeats:
                worked_s = seconds * (step - member.done_steps)  # too much after a resume, whose first step is unknown
                pause_s = self._clock() - member.began_at - worked_s
                self.pause_s = (self.pause_s + pause_s) / 2 if pause_s > 0 else self.pause_s
            member.is_starting, member.done_steps = False, step
            member.costs.measure_step(member.phase, member.workers, seconds)
            self._allocate()

    def _wait_for_slots(
        self, member: PoolMember, stage: Literal["training", "scoring"], reporter: Reporter
    ) -> list[int]:
        """Wait until a group has slots, and let it begin with them. Called with the lock held.

        Raises:
            StoppedEarlyError: The run was asked to stop.
        """
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
        member.began_at, member.is_starting = self._clock(), True
        return list(member.slots)

    def _allocate(self, begins_scoring: PoolMember | None = None) -> None:
        """Reserve free slots for groups that can work.

        Args:
            begins_scoring: A group that has not begun to score, so that it can take more slots for it.
        """
        if any(member.stage == "between phases" for member in self._members.values()):
            return
        held = {slot for member in self._members.values() for slot in member.slots}
        usable = self._usable()
        free = [slot for slot in usable if slot not in held]
        if not free:
            return
        working = {name: member for name, member in self._members.items() if member.can_work}
        work = [self._remaining(name, member, member is begins_scoring) for name, member in working.items()]
        for name, count in allocate_workers(work, len(held.union(usable))).items():
            member = working[name]
            added = count - len(member.slots)
            member.slots += free[:added]
            del free[:added]
        self._changed.notify_all()

    def _remaining(self, name: str, member: PoolMember, begins_scoring: bool) -> RemainingWork:
        counts, phase = member.counts, member.phase
        if begins_scoring or not phase.number:
            counts = range(counts[0], counts[-1] + 1)
        if member.stage == "scoring" and not begins_scoring:
            counts = [len(member.slots)]  # its parts are fixed
        seconds = {
            count: self._rest_s(member, count) for count in {*counts, *([len(member.slots)] if member.slots else [])}
        }
        return RemainingWork(name, seconds, len(member.slots), self.pause_s)

    def _rest_s(self, member: PoolMember, count: int) -> float:
        """Return the expected seconds of the rest of a group's phase."""
        if member.stage == "scoring":
            return max(0.0, member.costs.scoring_s(member.phase, count) - (self._clock() - member.began_at))
        return member.costs.seconds(member.phase, count, member.done_steps)


def pool_members(contexts: Sequence[GroupContext], slots: int, on_gpu: bool) -> dict[str, PoolMember]:
    """Return the groups by name. A model whose size is not known counts as the mean of the others.

    Args:
        contexts: Each group's part of the run.
        slots: Number of workers that the groups share.
        on_gpu: Whether each worker has a GPU.

    Raises:
        ClusterTooSmallError: A group needs more workers.
    """
    sizes = [count_parameters(context.group) for context in contexts]
    known = [size for size in sizes if size is not None] or [Parameters(1, 1)]
    mean = Parameters(*(sum(numbers) // len(known) for numbers in zip(*known, strict=True)))
    pairs = len(contexts[0].pairs)
    return {
        context.group.name: PoolMember(
            PhaseCosts.of(context.recipe, context.group, pairs, size or mean, on_gpu),
            worker_counts(context.group.rng_streams, slots, context.group.workers),
        )
        for context, size in zip(contexts, sizes, strict=True)
    }


_SECONDS_PER_PARAMETER = 4e-12
"""Assumed seconds of a pair's forward pass per parameter of a layer, until a group's first scores are measured. Until then only
ratios between groups matter, except next to the pause in which workers start."""
_TRAINING_PASSES = 3.0
"""Forward and backward pass of a training step over its forward pass."""
_UPDATE_PASSES = {"cpu": 1.7, "gpu": 27.0}
"""Optimizer's update per parameter, embeddings included, over a pair's forward pass per parameter of a layer: 1.5 to 1.9 on a CPU
core (MiniLM-L3, E5), 23 to 31 on an H100 (BERT-base; bi and cross steps of benchmarks/results)."""
_SERIAL_SHARE = 0.05
"""Assumed share of the passes that more workers do not shorten, until steps with several numbers of workers are measured. They do
not shorten the update."""


@dataclass
class PhaseCosts:
    """Expected seconds of one group's work.

    Attributes:
        steps: Training steps of a phase by formulation.
        times: Seconds of a training step by formulation.
        scoring_alone_s: Seconds of scoring all pairs with one worker, by formulation.
    """

    steps: Mapping[Kind, int]
    times: Mapping[Kind, StepTimes]
    scoring_alone_s: dict[Kind, float]
    _measured_steps: set[Kind] = field(default_factory=set)
    _measured_scores: set[Kind] = field(default_factory=set)

    @classmethod
    def of(
        cls, recipe: MutualRecipe, group: GroupSection, pairs: int, parameters: Parameters, on_gpu: bool
    ) -> PhaseCosts:
        """Estimate the costs of a group.

        Args:
            recipe: The run's recipe.
            group: The group.
            pairs: Number of pairs.
            parameters: Number of its model's parameters.
            on_gpu: Whether its workers have GPUs.
        """
        pair_s = _SECONDS_PER_PARAMETER * parameters.layers
        update_s = _UPDATE_PASSES["gpu" if on_gpu else "cpu"] * _SECONDS_PER_PARAMETER * parameters.all
        rows: dict[Kind, int] = {"bi": pairs, "cross": pairs * (2 if recipe.cross_of(group).both_orders else 1)}
        sections: dict[Kind, LoopSection] = {kind: recipe.loop_of(group, kind) for kind in KINDS}
        return cls(
            {kind: total_steps(loop, max(1, rows[kind] // loop.batch_size)) for kind, loop in sections.items()},
            {
                kind: _step_times(_TRAINING_PASSES * pair_s * loop.batch_size, update_s)
                for kind, loop in sections.items()
            },
            {kind: pair_s * pairs for kind in sections},
        )

    def seconds(self, phase: Phase, workers: int, done_steps: int = 0) -> float:
        """Return the expected seconds of a phase's rest after a number of training steps, scoring included."""
        return self.training_s(phase, workers, done_steps) + self.scoring_s(phase, workers)

    def training_s(self, phase: Phase, workers: int, done_steps: int = 0) -> float:
        """Return the expected seconds of the training that remains after a number of steps; 0 in phase 0."""
        if not phase.number:
            return 0.0
        return (self.steps[phase.kind] - done_steps) * self.times[phase.kind].seconds(workers)

    def scoring_s(self, phase: Phase, workers: int) -> float:
        """Return the expected seconds of scoring all pairs."""
        return self.scoring_alone_s[phase.kind] / workers

    def measure_step(self, phase: Phase, workers: int, seconds: float) -> None:
        """Record the mean seconds of recent training steps."""
        self.times[phase.kind].measure(workers, seconds)
        self._measured_steps.add(phase.kind)

    def measure_scores(self, phase: Phase, workers: int, seconds: float) -> None:
        """Record the seconds of scoring all pairs, and correct the estimates of what was not measured by their ratio."""
        ratio = seconds * workers / self.scoring_alone_s[phase.kind]
        for kind in self.steps:
            if kind == phase.kind or kind not in self._measured_scores:
                self.scoring_alone_s[kind] *= ratio
            if kind not in self._measured_steps and not self._measured_scores:
                self.times[kind].alone_s *= ratio
        self._measured_scores.add(phase.kind)


def _step_times(passes_s: float, update_s: float) -> StepTimes:
    """Estimate a step of forward and backward passes, and an update, with one worker each."""
    alone_s = passes_s + update_s
    return StepTimes(alone_s, (_SERIAL_SHARE * passes_s + update_s) / alone_s)
