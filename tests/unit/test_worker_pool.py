"""The pool of workers that the groups of a mutual distillation share: how many each group has, and what it loses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcse.devices.resources import Node
from distcse.errors import (
    ClusterTooSmallError,
    DistcseError,
    DivergedError,
    ObjectStorageError,
    OutOfMemoryError,
    RunTakenOverError,
    StoppedEarlyError,
    StorageWriteError,
    WorkersLostError,
    WorkFailedError,
)
from distcse.events import Event, GroupActivity, LogMessage, Reporter, StepReport, WorkersAssigned
from distcse.recipe import MutualRecipe
from distcse.runs.lease import Lease
from distcse.runs.mutual.experiment import run_groups
from distcse.runs.mutual.group import (
    Group,
    PooledGroup,
    PoolMember,
    RemainingWork,
    ResizableGroup,
    SlotsLost,
    WorkerPool,
    allocate_workers,
)
from distcse.runs.mutual.label_exchange import LabelExchange
from distcse.runs.mutual.phase_store import Phase, PhaseResult, PhaseStore, Scores, StoredScores
from distcse.runs.mutual.processes import plan_groups, with_max_workers, worker_counts
from distcse.storage import open_store
from tests.failures import fails_with
from tests.models import make_encoder
from tests.pairs import labels_of, make_mutual_recipe

MakeRecipe = Callable[..., MutualRecipe]
TIMEOUT_S = 30.0
STEPS = 100


@pytest.fixture
def three(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    models = {name: tiny("bert") for name in ("a", "b", "c")}
    return lambda *overrides: make_mutual_recipe(tmp_path, models, sentences, "mutual.cycles=1", *overrides)


# -- scheduling -----------------------------------------------------------------------------------------------------------


def make_work(group: str, cost: float, workers: int = 0, counts: Sequence[int] = (1, 2, 4, 8)) -> RemainingWork:
    return RemainingWork(group, cost, counts, workers)


def test_workers_divide_the_global_batch() -> None:
    assert worker_counts(32, 20, 1) == [1, 2, 4, 8, 16]
    assert worker_counts(6, 20, 1) == [1, 2, 3, 6]
    assert worker_counts(32, 20, least=3) == [4, 8, 16]
    for streams, slots, least in [(32, 3, 3), (7, 6, 2), (4, 20, 5)]:
        with fails_with(ClusterTooSmallError, f"batch of {streams} parts on at least {least} workers"):
            worker_counts(streams, slots, least)


@pytest.mark.parametrize(
    ("work", "slots", "pause_s", "expected"),
    [
        ([], 8, 0, {}),
        # Longer groups start with more workers.
        ([make_work("short", 1), make_work("long", 8), make_work("mid", 2)], 11, 0, {"short": 1, "mid": 2, "long": 8}),
        # More groups than slots run in waves from the longest.
        ([make_work(str(cost), cost) for cost in (1, 2, 3, 4)], 2, 0, {"4": 1, "3": 1, "2": 0, "1": 0}),
        ([make_work("1", 1), make_work("2", 2), make_work("4", 1, workers=1)], 2, 0, {"4": 1, "2": 1, "1": 0}),
        # Free slots go to the group that ends last, also if two of its numbers of workers fit.
        ([make_work("fast", 4, workers=1), make_work("slow", 12, workers=2)], 5, 0, {"fast": 1, "slow": 4}),
        ([make_work("fast", 4, workers=1), make_work("slow", 12, workers=2)], 6, 0, {"fast": 2, "slow": 4}),
        ([make_work("only", 4, workers=1)], 7, 0, {"only": 4}),
        # A number that no longer fits is not waited for.
        ([make_work("only", 4, counts=(1, 2, 3, 6))], 5, 0, {"only": 3}),
        # No group grows while another waits.
        ([make_work("working", 100, workers=1), make_work("waiting", 400)], 5, 0, {"working": 1, "waiting": 4}),
        ([make_work("working", 100, workers=1), make_work("waiting", 400)], 4, 0, {"working": 1, "waiting": 0}),
        # A group grows only if that pays for its pause.
        ([make_work("last", 12, workers=1)], 2, 5.9, {"last": 2}),
        ([make_work("last", 12, workers=1)], 2, 6.0, {"last": 1}),
        # A group at work never shrinks; the workers of a lost node count until they end.
        ([make_work("large", 1, workers=8), make_work("new", 100)], 8, 0, {"large": 8, "new": 0}),
        ([make_work("large", 1, workers=8), make_work("new", 100)], 4, 0, {"large": 8, "new": 0}),
    ],
)
def test_slots_of_the_groups(work: list[RemainingWork], slots: int, pause_s: float, expected: dict[str, int]) -> None:
    assert allocate_workers(work, slots, pause_s) == expected


# -- the pool -------------------------------------------------------------------------------------------------------------


PAIRS, BATCH = 1_000, 10


def make_member(step_s: float, counts: Sequence[int] = (1, 2, 4)) -> PoolMember:
    """Make a group whose phases take 100 steps of this many seconds, and whose scoring takes as long as 33 steps."""
    both = partial(dict.fromkeys, ("bi", "cross"))
    return PoolMember(counts, both(STEPS), both(BATCH), PAIRS, 1e6, pass_s=step_s / (3 * BATCH))


class Pool:
    """A pool of which each group waits for workers in a thread."""

    def __init__(self, slots: int, **step_s: float) -> None:
        self.members = {name: make_member(seconds) for name, seconds in step_s.items()}
        self.usable = list(range(slots))
        self.pool = WorkerPool(self.members, lambda: self.usable)
        self.stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def acquire(self, group: str, phase: int = 1, has_labels: bool = True) -> None:
        def acquire() -> None:
            with suppress(StoppedEarlyError):
                self.pool.acquire(group, Phase(phase), lambda: has_labels, Reporter(stop_requested=self.stopped.is_set))

        self._threads.append(threading.Thread(target=acquire, daemon=True))
        self._threads[-1].start()

    def wait(self, **slots: int) -> None:
        """Wait until groups have this many slots, and those with some work."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.slots(*slots) != slots or any(
            number and not self.members[name].workers for name, number in slots.items()
        ):
            assert time.monotonic() < deadline, self.slots(*slots)
            time.sleep(0.01)

    def slots(self, *groups: str) -> dict[str, int]:
        return {name: len(self.members[name].slots) for name in groups}

    def stop(self) -> None:
        self.stopped.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


def test_groups_without_room_run_later_and_the_last_one_grows() -> None:
    pool = Pool(2, long=4.0, short=2.0, last=1.0)
    for name in ("last", "short"):
        pool.acquire(name)
    time.sleep(0.1)
    assert pool.slots("last", "short") == {"last": 0, "short": 0}, "decided before all groups have said what they need"
    pool.acquire("long")
    pool.wait(long=1, short=1, last=0)
    assert not pool.pool.wants_more("long")
    assert len(pool.pool.begin_scoring("short")) == 1
    pool.pool.release("short")
    time.sleep(0.1)
    assert pool.slots("last") == {"last": 0}, "given away before it was known what the group needs next"
    pool.acquire("short", 2, has_labels=False)
    pool.wait(last=1)
    pool.pool.measure_steps("long", 50, 4.0)
    assert not pool.pool.wants_more("long")
    pool.pool.begin_scoring("last")
    pool.pool.release("last")
    pool.acquire("last", 2, has_labels=False)
    pool.wait(long=2)
    assert pool.pool.wants_more("long")
    held = pool.members["long"].slots[0]
    assert pool.pool.grow("long") == [held, 1 - held] and not pool.pool.wants_more("long")
    pool.stop()


def test_scoring_takes_free_workers_and_a_group_that_left_needs_none() -> None:
    pool = Pool(3, trains=100.0, waits=1.0, leaves=8.0)
    pool.acquire("trains")
    pool.acquire("waits", has_labels=False)
    pool.pool.leave("leaves")
    pool.wait(trains=2)  # three do not split its batch
    assert len(pool.pool.begin_scoring("trains")) == 3
    pool.stop()


def test_measured_steps_and_pauses_decide_whether_growth_pays() -> None:
    pool = Pool(1, grows=1.0, waits=1.0)
    pool.acquire("grows")
    pool.acquire("waits", has_labels=False)
    pool.wait(grows=1)
    pool.pool.measure_steps("grows", 10, 0.1)  # it took 60 seconds to start, and 9 seconds of steps remain
    pool.usable.append(1)
    pool.pool.measure_steps("grows", 20, 0.1)
    assert not pool.pool.wants_more("grows")
    pool.pool.measure_steps("grows", 30, 10.0)
    assert pool.pool.wants_more("grows")
    pool.stop()


def test_slots_of_lost_nodes_are_not_given_away() -> None:
    usable: list[int] = []
    events: list[Event] = []
    clock = iter(range(0, 10_000, 20))
    pool = WorkerPool({"only": make_member(1.0)}, lambda: usable, clock=lambda: float(next(clock)))

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, LogMessage):
            usable.extend([1, 3])

    assert pool.acquire("only", Phase(1), lambda: True, Reporter(emit)) == [1, 3]
    assert [event.text for event in events if isinstance(event, LogMessage)] == [
        "waiting for nodes with room for a shared worker"
    ]


def test_steps_are_measured_after_the_loss_of_a_node_and_estimated_by_size_before() -> None:
    pool = Pool(2, only=1.0, waits=1.0)
    pool.acquire("only")
    pool.acquire("waits", has_labels=False)
    pool.wait(only=2)
    pool.pool.measure_steps("only", 20, 1.0)
    only, waits = pool.members["only"], pool.members["waits"]
    assert (only.passes, only.pass_s) == (PAIRS + 80 * 3 * BATCH, 2.0 / (3 * BATCH)), "two workers"
    assert len(pool.pool.exchange("only", Reporter())) == 2
    pool.pool.measure_steps("only", 15, 1.0)
    assert only.passes == PAIRS + 85 * 3 * BATCH
    pool.pool.begin_scoring("only")
    pool.pool.measure_steps("only", 16, 9.0)
    assert (only.passes, only.pass_s) == (PAIRS, 2.0 / (3 * BATCH)), "a step that arrived late"
    waits.pass_s, waits.parameters = None, 3e6
    found = pool.pool.remaining("waits", waits, begins_scoring=False)
    assert found.alone_s == pytest.approx(3 * 2.0 * STEPS + 3 * 2.0 * PAIRS / (3 * BATCH))
    pool.stop()


# -- groups that share workers --------------------------------------------------------------------------------------------


class FakeWorkers(ResizableGroup):
    """Workers of a group that take steps of some milliseconds (see `ResizableGroup`).

    Args:
        name: The group's name.
        step_s: Seconds of a step with one worker.
        in_use: Slots in use, of all groups.
    """

    def __init__(self, name: str, step_s: float, in_use: dict[int, str]) -> None:
        self.name, self.numbers = name, [0]
        self._step_s, self._in_use, self._slots = step_s, in_use, list[int]()
        self._done_steps = 0
        self.reporter = Reporter()
        self.events: list[Event] = []

    def use(self, slots: Sequence[int]) -> None:
        for slot in self._slots:
            assert self._in_use.pop(slot) == self.name
        assert not any(slot in self._in_use for slot in slots)
        self._in_use.update(dict.fromkeys(slots, self.name))
        self._slots = list(slots)

    def train(
        self, phase: Phase, labels: StoredScores, should_pause: Callable[[], bool] = lambda: False
    ) -> PhaseResult | None:
        self.numbers.append(len(self._slots))
        while self._done_steps < STEPS:
            if should_pause() or self.reporter.stop_requested():
                return None
            seconds = self._step_s / len(self._slots)
            time.sleep(seconds)
            self._done_steps += 1
            self.reporter.emit(StepReport(self._done_steps, STEPS, {}, 1e-3, seconds, 0.0))
        self._done_steps = 0
        return PhaseResult(STEPS, 0.5, STEPS)

    def score(self, phase: Phase) -> Scores:
        assert self._slots
        return np.full(4, ord(self.name) + phase.number, dtype=np.float32)

    def close(self) -> None:
        self.use([])


def finish(
    recipe: MutualRecipe,
    folder: Path,
    usable: Callable[[], Sequence[int]],
    counts: Sequence[int] = (1,),
    step_s: Sequence[float] = (0.0001,) * 3,
    **kinds: type[FakeWorkers],
) -> list[FakeWorkers]:
    """Run the groups a, b and c to their end on the usable slots, and return their workers, which collect their events."""
    in_use, ending, groups = dict[int, str](), threading.Event(), list[Group]()
    times = dict(zip("abc", step_s, strict=True))
    pool = WorkerPool({name: make_member(seconds, counts) for name, seconds in times.items()}, usable)
    workers = [kinds.get(name, FakeWorkers)(name, seconds, in_use) for name, seconds in times.items()]
    store = PhaseStore(open_store(folder, Lease.acquire(open_store(folder))))
    for each in workers:
        each.reporter = pool.observed(each.name, Reporter())
        groups.append(PooledGroup(each, pool, Reporter(each.events.append, ending.is_set)))
    try:
        assert not run_groups(recipe, groups, store, LabelExchange(recipe, store, ending), Reporter())
    finally:
        assert not in_use
    return workers


def assert_labels_of_all(folder: Path) -> None:
    for number, labels in enumerate(labels_of(folder)):
        np.testing.assert_allclose(labels, ord("b") + number)


def test_groups_share_workers_from_the_start_to_the_end_of_a_run(
    three: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distcse.runs.mutual.group.PAUSE_S", 0.001)
    workers = finish(three(), tmp_path, lambda: range(2), counts=(1, 2), step_s=(0.012, 0.001, 0.001))
    assert_labels_of_all(tmp_path)
    assert 2 in workers[0].numbers, "the slowest group took no worker of the others"
    for each in workers:
        numbers = [event.workers for event in each.events if isinstance(event, WorkersAssigned)]
        assert numbers.count(0) == 3 and numbers[-1] == 0, "workers that were released after a phase were not reported"
        assert all(number != following for number, following in pairwise(numbers))
        assert 2 in numbers or each.name != "a"


@pytest.mark.parametrize("is_drained", [True, False])
def test_a_group_continues_in_other_slots_after_a_node_was_lost(
    three: MakeRecipe, tmp_path: Path, is_drained: bool
) -> None:
    """Group a loses a node while it trains its first cross-encoder, or Ray begins to drain that node.

    When the group scores, that node is back, and it loses the other.
    """
    usable, losses = [0, 1], list[str]()

    class LosesNodes(FakeWorkers):
        def loses(self, activity: str, phase: Phase) -> bool:
            assert set(self._slots) <= set(usable)
            if self.name != "a" or phase != Phase(1) or activity in losses:
                return False
            losses.append(activity)
            usable[:] = [slot for slot in (0, 1) if slot not in self._slots]
            return True

        def train(self, phase: Phase, *rest: Any, **named: Any) -> PhaseResult | None:
            if self.loses("training", phase):
                if is_drained:
                    return None
                raise SlotsLost
            return super().train(phase, *rest, **named)

        def score(self, phase: Phase) -> Scores:
            if self.loses("scoring", phase):
                raise SlotsLost
            return super().score(phase)

    events = finish(three(), tmp_path, lambda: usable, a=LosesNodes, b=LosesNodes, c=LosesNodes)[0].events
    assert losses == ["training", "scoring"]
    assert_labels_of_all(tmp_path)
    lost = "lost a node in cycle-1-cross; other shared workers continue"
    continued = "continuing cycle-1-cross with 1 workers"
    texts = [event.text for event in events if isinstance(event, LogMessage)]
    assert texts == [*([] if is_drained else [lost]), continued, lost, continued]
    activities = [event.activity for event in events if isinstance(event, GroupActivity)]
    assert [activity for activity in activities if activity != "waiting"] == ["training", "scoring"]


@pytest.mark.parametrize(
    ("error", "on_failure", "is_dropped"),
    [
        (WorkersLostError("lost"), "drop", True),
        (WorkersLostError("lost"), "stop", False),
        (DivergedError("diverged"), "drop", True),
        (OutOfMemoryError("too large"), "drop", True),
        (StorageWriteError("disk full"), "drop", False),
        (ObjectStorageError("not reached"), "drop", False),
        (RunTakenOverError("taken over"), "drop", False),
        (WorkFailedError("OSError"), "drop", False),
    ],
)
def test_only_errors_of_a_group_drop_it(
    three: MakeRecipe, tmp_path: Path, error: DistcseError, on_failure: str, is_dropped: bool
) -> None:
    class Fails(FakeWorkers):
        def score(self, phase: Phase) -> Scores:
            raise error

    recipe = three(f"mutual.on_failure={on_failure}")
    with nullcontext() if is_dropped else fails_with(type(error), str(error)):
        finish(recipe, tmp_path, lambda: range(1), b=Fails)
    assert list(PhaseStore(open_store(tmp_path)).dropped) == ["b"] * is_dropped
    if is_dropped:
        np.testing.assert_allclose(labels_of(tmp_path)[2], ord("b") + 2)


# -- the cluster ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "overrides", "number", "each"),
    [
        ([{"CPU": 2.0}], [], 2, {"CPU": 1.0}),
        ([{"CPU": 16.0}], [], 3, {"CPU": 5.3}),
        ([{"CPU": 16.0}], [f"groups.{n}.cpus_per_worker=2" for n in range(3)], 8, {"CPU": 2.0}),
        ([{"CPU": 16.0}], ["mutual.shared_workers=4"], 4, {"CPU": 4.0}),
        ([{"CPU": 16.0, "GPU": 4.0}, {"CPU": 64.0}], [], 4, {"CPU": 4.0, "GPU": 1.0}),
        ([{"CPU": 16.0, "GPU": 4.0}], ["resources.gpu=none"], 3, {"CPU": 5.3}),
    ],
)
def test_shared_workers_fit_the_cluster(
    three: MakeRecipe, nodes: list[dict[str, float]], overrides: list[str], number: int, each: dict[str, float]
) -> None:
    recipe = three("ray=true", "mutual.shared_workers=auto", *overrides)
    plan = plan_groups(recipe, recipe.groups, [Node(str(n), resources, {}) for n, resources in enumerate(nodes)])
    assert (plan.shared_workers, plan.per_worker) == (number, [each] * 3)


def test_a_cluster_without_room_for_a_group_is_refused(three: MakeRecipe) -> None:
    recipe = three("ray=true", "mutual.shared_workers=2", "groups.1.workers=4")
    with fails_with(ClusterTooSmallError, "4 of 2 shared workers", "groups.N.workers"):
        plan_groups(recipe, recipe.groups, [Node("one", {"CPU": 2.0}, {})])


def test_larger_models_take_more_workers(three: MakeRecipe, tmp_path: Path, sentences: list[str]) -> None:
    large = make_encoder(tmp_path / "large", "bert", sentences, layers=8)
    overrides = (f"groups.1.backbone={large}", "groups.2.layers=[0]", "mutual.shared_workers=auto")
    recipe = with_max_workers(three(*overrides), Reporter())
    assert [group.max_workers for group in recipe.groups] == [2, 8, 1]
    assert with_max_workers(recipe, Reporter()) == recipe
    assert with_max_workers(three(), Reporter()) == three()
