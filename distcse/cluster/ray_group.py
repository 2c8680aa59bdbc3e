"""A group on Ray: training workers, each with a scorer that shares its resources, in bundles of placement groups."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from distcse.cluster.cluster import worker_environment
from distcse.cluster.event_channel import EventChannel, unique_name
from distcse.cluster.group_actors import GroupActor, PairsCounter, ScoringActor, TrainingActor
from distcse.cluster.heartbeat import CONCURRENCY, HeartbeatMonitor
from distcse.cluster.nodes import DrainNotices
from distcse.cluster.versions import draining_nodes
from distcse.devices.resources import format_resources
from distcse.errors import (
    DistcseError,
    ProcessLostError,
    StoppedEarlyError,
    WorkersLostError,
    WorkFailedError,
    first_line,
    last_line,
)
from distcse.events import Reporter, WaitWarning
from distcse.runs.mutual.group import (
    Group,
    PooledGroup,
    ResizableGroup,
    SlotsLost,
    StepPasses,
    WorkerPool,
    pool_members,
)
from distcse.runs.mutual.phase_store import GroupContext, Phase, PhaseResult, Scores, StoredScores
from distcse.runs.mutual.phase_trainer import ScoringProgress
from distcse.runs.mutual.processes import GroupResources

_STATES_AGE_S = 1.0
"""Seconds for which the states of a pool's placement groups are not asked for again."""


@dataclass(frozen=True)
class Slot:
    """Resources of one worker and its scorer."""

    placement_group: PlacementGroup
    bundle: int

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """The strategy that schedules an actor in the slot."""
        return PlacementGroupSchedulingStrategy(self.placement_group, placement_group_bundle_index=self.bundle)


def reserve(
    number: int, resources: Mapping[str, float], node_labels: Mapping[str, str] | None, name: str
) -> list[Slot]:
    """Request a placement group for workers that start together, with one slot each."""
    labels = [dict(node_labels)] * number if node_labels else None
    group = placement_group(
        [dict(resources)] * number, name=unique_name(name), strategy="PACK", bundle_label_selector=labels
    )
    return [Slot(group, bundle) for bundle in range(number)]


def remove(slots: Sequence[Slot]) -> None:
    """Remove the placement groups of slots. Actors that still run there are killed."""
    for group in {slot.placement_group for slot in slots}:
        remove_placement_group(group)


def nodes_of(slots: Sequence[Slot]) -> set[str]:
    """Return the ids of the nodes of slots, without those of slots that wait for a node."""
    tables = {slot.placement_group: placement_group_table(slot.placement_group) for slot in slots}
    return {
        tables[slot.placement_group]["bundles_to_node_id"][slot.bundle]
        for slot in slots
        if tables[slot.placement_group].get("state") == "CREATED"
    }


class SlotPool:
    """Slots that are reserved and lost one by one, each a placement group. Thread-safe: each group runs in a thread."""

    def __init__(
        self, number: int, resources: Mapping[str, float], node_labels: Mapping[str, str] | None, name: str
    ) -> None:
        self.slots = [slot for _ in range(number) for slot in reserve(1, resources, node_labels, name)]
        self._nodes: dict[Slot, str] = {}
        self._usable: list[int] = []
        self._asked_at = float("-inf")
        self._asking = threading.Lock()

    def usable(self) -> list[int]:
        """Return the numbers of the slots whose nodes are there and not drained, those of one node next to each other."""
        with self._asking:
            self._ask()
            return self._usable

    def has_lost(self, slots: Sequence[Slot]) -> bool:
        """Return whether the node of one of these slots, which has been usable, was lost and Ray has no other one for it yet."""
        with self._asking:
            self._ask()
            return not self._nodes.keys() >= set(slots)

    def _ask(self) -> None:
        """Ask Ray for the nodes of the slots, unless it was asked a second ago."""
        if time.monotonic() - self._asked_at > _STATES_AGE_S:
            tables = [placement_group_table(slot.placement_group) for slot in self.slots]
            self._nodes = {
                slot: table["bundles_to_node_id"][0]
                for slot, table in zip(self.slots, tables, strict=True)
                if table.get("state") == "CREATED"
            }
            leaving = draining_nodes()
            staying = [(node, self.slots.index(slot)) for slot, node in self._nodes.items() if node not in leaving]
            self._usable = [number for _, number in sorted(staying)]
            self._asked_at = time.monotonic()

    def remove(self) -> None:
        """Remove all slots."""
        remove(self.slots)


_POLL_S = 0.2
_LOSS_DETECTION_S = 15
"""Seconds within which Ray reports the loss of an actor."""
_NODE_LOSS_S = 30
"""Seconds within which Ray reports the loss of a node."""


class RayGroup(ResizableGroup):
    """A group of Ray actors (see `Group`). Lost and hanging actors are replaced, and those on a drained node move.

    Args:
        context: The group's part of the run.
        reporter: Receives the group's events.
        resources: CPUs and GPUs of one worker, which its scorer uses while it does not train.
        reserve_slots: Reserves the slots that the group keeps, one for each worker. Default: it uses slots of the pool.
        pool: The pool of slots for `use`. Default: none.
    """

    def __init__(
        self,
        context: GroupContext,
        reporter: Reporter,
        resources: Mapping[str, float],
        reserve_slots: Callable[[], list[Slot]] | None = None,
        pool: SlotPool | None = None,
    ) -> None:
        self.name = context.group.name
        self._context, self._reporter, self._resources = context, reporter, dict(resources)
        self._reserve_slots, self._pool = reserve_slots, pool
        self.slots = [] if reserve_slots is None else reserve_slots()
        """Where its workers run. Who opened the group removes them."""
        self._nodes: set[str] = set()
        self._notices, self._is_drained = DrainNotices(), False
        self._losses: Counter[tuple[Phase, str]] = Counter()
        self._closed = False
        self._passes = StepPasses(context)
        self._trainers: list[Any] = []
        self._scorers: list[Any] = []
        monitor = HeartbeatMonitor(
            context.recipe.mutual.heartbeat_timeout_s,
            reporter.warn,
            key="mutual.heartbeat_timeout_s",
        )
        self._monitoring = ExitStack()
        self._monitor = self._monitoring.enter_context(monitor)

    def prepare(self, phase: Phase) -> None:
        # Not awaited, so its errors are lost: training prepares again, and raises them.
        self._retry(phase, lambda: [trainer.prepare.remote(phase) for trainer in self._trainers])

    def use(self, slots: Sequence[int]) -> None:
        """Work in these slots of the pool from now on; see `ResizableGroup.use`."""
        assert self._pool is not None
        new = [self._pool.slots[number] for number in slots]
        if new == self.slots:
            return
        is_grown = bool(self.slots) and new[: len(self.slots)] == self.slots
        self._end_trainers()  # a process group has a fixed size
        if not is_grown:
            self._scorers = self._end(self._scorers)
        self.slots, self._is_drained = new, False

    def train(
        self, phase: Phase, labels: StoredScores, should_pause: Callable[[], bool] = lambda: False
    ) -> PhaseResult | None:
        def pauses() -> bool:
            return should_pause() or self._drains(phase)

        def train(passes: int) -> PhaseResult | None:
            while True:
                trained: PhaseResult | None = self._retry(phase, lambda: self._train(phase, labels, passes, pauses))
                if trained is not None or self._reporter.stop_requested():
                    return trained
                if self._reserve_slots is None:  # the pool has other slots
                    return None

        # All trainers end before a repetition: the others wait for the one that failed.
        return self._passes.fit(phase, train, self._end_trainers, self._reporter)

    def score(self, phase: Phase) -> Scores:
        # Trainers on reserved slots start early, to be ready for the labels. In a pool they would end unused, or start again.
        scores: Scores = self._retry(phase, lambda: self._score(phase), trains=self._pool is None)
        return scores

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._monitoring.close()
            self._end_all()

    def _train(
        self, phase: Phase, labels: StoredScores, passes: int, should_pause: Callable[[], bool]
    ) -> PhaseResult | None:
        # Preparing takes minutes with many pairs, and does not check for stops: this waits for it, and does.
        self._get([trainer.prepare.remote(phase) for trainer in self._trainers])
        channel = EventChannel(f"{self._context.run.name}-{self.name}")
        stop_requested = self._reporter.stop_requested
        reporter = replace(self._reporter, stop_requested=lambda: stop_requested() or should_pause())
        try:
            options = {"name": f"train {self.name} {phase.name}"}
            tasks = [
                trainer.train.options(**options).remote(phase, labels, channel.actor, passes)
                for trainer in self._trainers
            ]
            waiting = tasks
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
                channel.relay(reporter)
                try:
                    ray.get(done)  # raises early: when a worker is lost, the others wait for it or fail
                except RayTaskError as failed:
                    raise _find_lost_actor(tasks, failed) or failed from None
            trained: PhaseResult | None = ray.get(tasks[0])
            return trained
        finally:
            channel.close()

    def _score(self, phase: Phase) -> Scores:
        """Score the parts of the pairs, one per scorer. A lost scorer is replaced and repeats its part alone."""
        parts = len(self._scorers)
        running = {self._begin_part(phase, part): part for part in range(parts)}
        scores: dict[int, Scores] = {}
        progress, counter = ScoringProgress(self._reporter), PairsCounter(self._scorers)
        while running:
            ready, _ = ray.wait([*running], num_returns=1, timeout=_POLL_S)
            for task in ready:
                part = running.pop(task)
                try:
                    scores[part] = ray.get(task)
                except RayTaskError:
                    raise
                except RayError as lost:
                    self._check_nodes(lost)
                    self._count_loss(phase, f"scorer {part}", lost)
                    self._reporter.warn(f"lost a scorer in {phase.name}; another one repeats its part of the pairs")
                    self._replace_scorer(part)
                    running[self._begin_part(phase, part)] = part
            if running:
                self._check_wait()
            if progress.is_due:
                progress.report(*counter.count({part: len(part_scores) for part, part_scores in scores.items()}))
        all_scores = np.concatenate([scores[part] for part in range(parts)])
        progress.report(len(all_scores), len(all_scores))
        return all_scores

    def _begin_part(self, phase: Phase, part: int) -> Any:
        options = {"name": f"score {self.name} {phase.name}"}
        return self._scorers[part].score.options(**options).remote(phase, part, len(self._scorers))

    def _get(self, tasks: Sequence[Any]) -> list[Any]:
        """Wait for the results of actor tasks."""
        waiting = list(tasks)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
            ray.get(done)  # raise the first failure now: the other actors may wait for the one that failed
            if waiting:
                self._check_wait()
        return list(ray.get(list(tasks)))

    def _check_wait(self) -> None:
        """Raise an exception if the group need not wait any longer for actors or their results.

        Raises:
            StoppedEarlyError: The run was asked to stop, or the group was closed.
            SlotsLost: A slot of the pool was lost. A group that keeps its slots waits for another node.
        """
        self._reporter.check_stop(f"while {self.name} waited")
        if self._closed:
            raise StoppedEarlyError(f"{self.name} was closed")
        if self._pool is not None and self._pool.has_lost(self.slots):
            raise SlotsLost

    def _check_nodes(self, lost: RayError) -> None:
        """Check after the loss of an actor that its node was not lost: this does not count as a loss of a shared worker.

        Raises:
            SlotsLost: The node of a slot of the pool was lost. There may be another one for the slot.
        """
        if self._pool is None or self._closed:
            return
        # Ray knows at once that a process has ended, and later that a node was lost: until then its actors are unavailable.
        until = time.monotonic() + (_NODE_LOSS_S if isinstance(lost, ActorUnavailableError) else 0.0)
        while nodes_of(self.slots) == self._nodes:
            if time.monotonic() >= until or self._reporter.stop_requested():
                return
            time.sleep(_POLL_S)
        raise SlotsLost

    def _retry(self, phase: Phase, work: Any, trains: bool = True) -> Any:
        """Call `work`, and repeat it with new actors when one is lost. It needs scorers, and with `trains` trainers too.

        Raises:
            StoppedEarlyError: The run was asked to stop before or during `work`.
            DistcseError: An error of the user's, from an actor.
            WorkFailedError: An unexpected exception in an actor.
            WorkersLostError: Actors were lost more often than mutual.max_failures allows.
            ProcessLostError: The group was closed during `work`.
            SlotsLost: A slot of the pool was lost.
        """
        while True:
            self._reporter.check_stop(f"before {phase.name} of {self.name}")
            try:
                if self._reserve_slots is not None and self._drains(phase):
                    self._end_all()
                    remove(self.slots)
                    self.slots, self._is_drained = self._reserve_slots(), False  # on nodes that Ray does not drain
                self._start_actors(trains)
                return work()
            except RayTaskError as failed:
                if isinstance(failed.cause, DistcseError):
                    raise failed.cause from failed
                raise WorkFailedError(f"group {self.name} failed in {phase.name}: {last_line(failed)}") from failed
            except RayError as lost:  # an actor was killed or out of memory, or its node or a result was lost
                self._check_nodes(lost)
                self._count_loss(phase, "a worker", lost)
                self._end_all()
                self._reporter.warn(f"lost a worker in {phase.name}; restarting from the last checkpoint")

    def _drains(self, phase: Phase) -> bool:
        """Return whether Ray drains a node of the group's slots, as after a preemption notice. Asks Ray every 2 s."""
        if not self._is_drained and self._notices.count(lambda: nodes_of(self.slots)):
            self._is_drained = True
            text = f"Ray drains a node of the group: {phase.name} continues on others from a checkpoint"
            self._reporter.warn(text)
        return self._is_drained

    def _count_loss(self, phase: Phase, actor: str, lost: RayError) -> None:
        """Count the loss of `a worker` or of a scorer."""
        if self._closed:
            raise ProcessLostError(f"group {self.name} was closed in {phase.name}") from lost
        self._losses[phase, actor] += 1
        if (times := self._losses[phase, actor]) > self._context.recipe.mutual.max_failures:
            raise WorkersLostError(
                f"group {self.name} lost {actor} {times} times in {phase.name}, the last time because of: "
                f"{first_line(lost)}; resume from the last checkpoint with --resume"
            ) from lost

    def _start_actors(self, trains: bool) -> None:
        """Start the scorers, and with `trains` the trainers, that are not running; join the trainers into a process group."""
        number = len(self.slots)
        if len(self._scorers) == number and (self._trainers or not trains):
            return
        self._wait_for_resources(self.slots)
        self._nodes = nodes_of(self.slots)
        for part in range(len(self._scorers), number):
            self._scorers.append(self._start(ScoringActor, part, self._context))
        if trains and not self._trainers:
            self._trainers = [self._start(TrainingActor, rank, self._context, rank, number) for rank in range(number)]
            if number > 1:
                (address,) = self._get([self._trainers[0].open_group.remote()])
                self._get([trainer.join.remote(*address) for trainer in self._trainers])

    def _start(self, kind: type[GroupActor], number: int, *arguments: Any) -> Any:
        """Start the trainer or scorer of this number in its slot, and monitor it."""
        cpus, gpus = self._resources["CPU"], self._resources.get("GPU", 0.0)
        role = "trainer" if kind is TrainingActor else "scorer"
        # A loss must be noticed, because the others of a process group fail with it: Ray restarts no actor.
        actor = (
            ray.remote(**CONCURRENCY)(kind)
            .options(
                name=f"{role}-{unique_name(f'{self._context.run.name}-{self.name}')}-{number}",
                num_cpus=cpus if kind is TrainingActor else 0,
                num_gpus=gpus / 2,
                scheduling_strategy=self.slots[number].strategy,
                runtime_env={"env_vars": worker_environment(gpus)},
            )
            .remote(*arguments, cpus, gpus)
        )
        self._monitor.add(f"{role} {number} of group {self.name}", actor)
        return actor

    def _replace_scorer(self, part: int) -> None:
        self._end([self._scorers[part]])
        self._wait_for_resources([self.slots[part]])  # its node may be lost, and the bundle waits for another
        self._scorers[part] = self._start(ScoringActor, part, self._context)

    def _wait_for_resources(self, slots: Sequence[Slot]) -> None:
        """Wait for slots without a timeout, because a cluster may grow; warn after a while."""
        ready = [group.ready() for group in {slot.placement_group for slot in slots}]
        warning = WaitWarning(self._reporter)
        while ray.wait(ready, num_returns=len(ready), timeout=1)[1]:
            self._check_wait()
            warning.check(
                f"waiting for nodes with room for {len(slots)} workers of {format_resources(self._resources)} each; "
                "ray: false runs the groups one after the other"
            )
        ray.get(ready)

    def _end(self, actors: Sequence[Any]) -> list[Any]:
        """Kill actors; return the empty list of those that remain."""
        for actor in actors:
            self._monitor.remove(actor)
            ray.kill(actor)
        return []

    def _end_trainers(self) -> None:
        self._trainers = self._end(self._trainers)

    def _end_all(self) -> None:
        self._end_trainers()
        self._scorers = self._end(self._scorers)


def _find_lost_actor(tasks: Sequence[Any], failed: RayTaskError) -> RayActorError | None:
    """Return the loss of another worker that made a collective operation fail; None if no worker was lost."""
    if len(tasks) == 1 or isinstance(failed.cause, DistcseError):
        return None
    ray.wait(list(tasks), num_returns=len(tasks), timeout=_LOSS_DETECTION_S)
    for task in tasks:
        try:
            ray.get(task, timeout=0)
        except RayActorError as lost:
            return lost
        except (RayError, TimeoutError):
            continue
    return None


@contextmanager
def groups_of_own_workers(
    contexts: Sequence[GroupContext], reporters: Sequence[Reporter], resources: GroupResources
) -> Iterator[list[Group]]:
    """Context manager: groups that each keep their workers for the entire run; arguments as for `Backend.open_groups`."""
    groups: list[RayGroup] = []
    try:
        for context, reporter, each in zip(contexts, reporters, resources.per_worker, strict=True):
            group, name = context.group, f"{context.run.name}-{context.group.name}"
            reserve_slots = partial(reserve, group.workers, each, group.node_labels, name)
            groups.append(RayGroup(context, reporter, each, reserve_slots))
        yield [*groups]
    finally:
        for opened in groups:
            opened.close()
        for opened in groups:
            remove(opened.slots)


@contextmanager
def groups_of_shared_workers(
    contexts: Sequence[GroupContext], reporters: Sequence[Reporter], resources: GroupResources
) -> Iterator[list[Group]]:
    """Context manager: groups that take workers from one pool for each phase; arguments as for `Backend.open_groups`."""
    number, each = resources.shared_workers, resources.per_worker[0]
    assert number is not None
    slots = SlotPool(number, each, contexts[0].group.node_labels, contexts[0].run.name)
    groups: list[Group] = []
    try:
        pool = WorkerPool(pool_members(contexts, number), slots.usable)
        for context, reporter in zip(contexts, reporters, strict=True):
            on_ray = RayGroup(context, pool.observed(context.group.name, reporter), each, pool=slots)
            groups.append(PooledGroup(on_ray, pool, reporter))
        yield groups
    finally:
        for group in groups:
            group.close()
        slots.remove()
