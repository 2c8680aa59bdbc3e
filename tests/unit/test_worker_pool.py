"""The pool of workers that groups of a mutual distillation share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from distcse.devices.resources import Node
from distcse.errors import (
    ClusterTooSmallError,
    DistcseError,
    DivergedError,
    InvalidValueError,
    ObjectStorageError,
    OutOfMemoryError,
    RunTakenOverError,
    StoppedEarlyError,
    StorageWriteError,
    WorkersLostError,
    WorkFailedError,
)
from distcse.events import Event, GroupActivity, LogMessage, Reporter, StepReport, WorkersAssigned, ignore
from distcse.models import Encoder
from distcse.recipe import MutualRecipe
from distcse.runs.lease import Lease
from distcse.runs.mutual.experiment import run_groups
from distcse.runs.mutual.group import Group
from distcse.runs.mutual.label_exchange import LabelExchange
from distcse.runs.mutual.phase_store import PhaseStore, Scores, StoredScores
from distcse.runs.mutual.phases import Phase, PhaseResult
from distcse.runs.mutual.pooled_group import PooledGroup, SlotsLost
from distcse.runs.mutual.processes import Parameters, count_parameters, plan_groups, with_max_workers
from distcse.runs.mutual.scheduling import StepTimes
from distcse.runs.mutual.worker_pool import FIRST_PAUSE_S, PhaseCosts, PoolMember, WorkerPool
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


def make_member(step_s: float, counts: Sequence[int] = (1, 2, 4)) -> PoolMember:
    """Make a group whose phases take 100 steps, and as long as ten steps to score."""
    times = {"bi": StepTimes(step_s, 0.0), "cross": StepTimes(step_s, 0.0)}
    scoring = {"bi": 10 * step_s, "cross": 10 * step_s}
    return PoolMember(PhaseCosts({"bi": STEPS, "cross": STEPS}, times, scoring), counts)  # type: ignore[arg-type]


class Pool:
    """A pool of which each group waits for workers in a thread; a test moves the clock."""

    def __init__(self, slots: int, **step_s: float) -> None:
        self.now = 0.0
        self.members = {name: make_member(seconds) for name, seconds in step_s.items()}
        self.usable = list(range(slots))
        self.pool = WorkerPool(self.members, lambda: self.usable, clock=lambda: self.now)
        self.stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def acquire(self, group: str, phase: int = 1, has_labels: bool = True) -> None:
        def acquire() -> None:
            with pytest.raises(StoppedEarlyError):
                self.pool.acquire(group, Phase(phase), lambda: has_labels, Reporter(stop_requested=self.stopped.is_set))
                raise StoppedEarlyError("ended")

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


def test_nothing_is_decided_before_all_groups_have_said_what_they_need() -> None:
    pool = Pool(5, short=1.0, long=4.0)
    pool.acquire("short")
    time.sleep(0.1)
    assert pool.slots("short") == {"short": 0}
    pool.acquire("long")
    pool.wait(short=1, long=4)
    pool.stop()
    assert sorted(pool.members["short"].slots + pool.members["long"].slots) == [0, 1, 2, 3, 4]


def test_groups_without_room_run_later_and_the_last_one_grows() -> None:
    pool = Pool(2, long=4.0, short=2.0, last=1.0)
    for name in ("last", "short", "long"):
        pool.acquire(name)
    pool.wait(long=1, short=1, last=0)
    assert not pool.pool.wants_more("long")
    assert len(pool.pool.begin_scoring("short")) == 1
    pool.now = 220.0
    pool.pool.release("short")
    time.sleep(0.1)
    assert pool.slots("last") == {"last": 0}, "given away before it was known what the group needs next"
    pool.acquire("short", 2, has_labels=False)
    pool.wait(last=1)
    pool.pool.measure_steps("long", 50, 4.0)
    assert not pool.pool.wants_more("long")
    pool.pool.begin_scoring("last")
    pool.now = 240.0
    pool.pool.release("last")
    pool.acquire("last", 2, has_labels=False)
    pool.wait(long=2)
    assert pool.pool.wants_more("long")
    held = pool.members["long"].slots[0]
    assert pool.pool.grow("long") == [held, 1 - held] and not pool.pool.wants_more("long")
    pool.stop()


def test_scoring_takes_free_workers_and_a_group_that_left_needs_none() -> None:
    pool = Pool(4, trains=1.0, leaves=8.0)
    pool.acquire("trains")
    pool.pool.leave("leaves")
    pool.wait(trains=4)
    other = Pool(3, trains=100.0, waits=1.0)
    other.acquire("trains")
    other.acquire("waits", has_labels=False)
    other.wait(trains=2)  # three do not split its batch
    assert len(other.pool.begin_scoring("trains")) == 3
    pool.stop()
    other.stop()


def test_measured_steps_and_pauses_decide_whether_growth_pays() -> None:
    pool = Pool(1, grows=1.0, waits=1.0)
    pool.acquire("grows")
    pool.acquire("waits", has_labels=False)
    pool.wait(grows=1)
    pool.now = 60.0 + 10 * 0.1
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


def test_scores_are_measured_at_the_end_of_a_phase() -> None:
    pool = Pool(1, only=1.0)
    pool.acquire("only")
    pool.wait(only=1)
    pool.now = 40.0
    pool.pool.measure_steps("only", 1, 6.0)
    pool.pool.begin_scoring("only")
    pool.now = 60.0
    pool.pool.release("only")
    assert pool.members["only"].costs.scoring_alone_s["cross"] == 20.0
    assert pool.members["only"].costs.times["cross"].seconds(1) == 6.0
    pool.stop()


def test_the_measured_costs_of_a_phase_are_those_without_the_loss_of_its_node() -> None:
    """Steps from the last checkpoint on are repeated, and stored scores are not, so that neither time is that of a phase."""
    pool = Pool(1, only=1.0)
    pool.acquire("only")
    pool.wait(only=1)
    pool.now = 30.0
    pool.pool.measure_steps("only", 20, 1.0)
    assert pool.pool.pause_s == (FIRST_PAUSE_S + 10) / 2
    assert pool.pool.exchange("only", Reporter()) == [0]
    pool.now = 65.0
    pool.pool.measure_steps("only", 15, 1.0)
    assert pool.pool.pause_s == (FIRST_PAUSE_S + 10) / 2
    pool.pool.begin_scoring("only")
    pool.now = 95.0
    estimate = dict(pool.members["only"].costs.scoring_alone_s)
    assert pool.pool.exchange("only", Reporter()) == [0]
    pool.now = 96.0
    pool.pool.release("only")
    assert pool.members["only"].costs.scoring_alone_s == estimate
    pool.stop()


@pytest.mark.parametrize(("on_gpu", "share"), [(False, 0.02), (True, 0.25)])
def test_a_large_vocabulary_makes_steps_longer_and_scores_not(three: MakeRecipe, on_gpu: bool, share: float) -> None:
    recipe = three("bi.batch_size=128", "cross.batch_size=128", "pairs.limit=1000")
    small, large = (
        PhaseCosts.of(recipe, recipe.groups[0], 1_000, Parameters(20_000_000, number), on_gpu)
        for number in (20_000_000, 120_000_000)
    )
    for phase in (Phase(1), Phase(2)):
        assert small.scoring_s(phase, 1) == large.scoring_s(phase, 1)
        longer_s = large.training_s(phase, 1) - small.training_s(phase, 1)
        assert share < longer_s / small.training_s(phase, 1) < 2 * share
        assert large.training_s(phase, 4) - small.training_s(phase, 4) == pytest.approx(longer_s), (
            "each worker updates all"
        )


def test_parameters_of_layers_and_embeddings_are_counted(three: MakeRecipe) -> None:
    group = three().groups[0]
    weights = {name: tensor.numel() for name, tensor in Encoder.from_section(group).backbone.state_dict().items()}
    layers = {number: sum(s for name, s in weights.items() if f"layer.{number}." in name) for number in range(3)}
    one_layer = count_parameters(group.model_copy(update={"layers": [0]}))
    assert count_parameters(group) == (sum(layers.values()), sum(weights.values()))
    assert one_layer == (layers[0], sum(weights.values()) - layers[1] - layers[2])


class FakeWorkers:
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
        return PhaseResult("model", STEPS, 0.5, STEPS)

    def score(self, phase: Phase) -> Scores:
        assert self._slots
        return np.full(4, ord(self.name) + phase.number, dtype=np.float32)

    def close(self) -> None:
        self.use([])


def test_groups_share_workers_from_the_start_to_the_end_of_a_run(
    three: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distcse.runs.mutual.worker_pool.FIRST_PAUSE_S", 0.001)
    in_use: dict[int, str] = {}
    steps = {"a": 0.012, "b": 0.001, "c": 0.001}
    pool = WorkerPool({name: make_member(seconds, (1, 2)) for name, seconds in steps.items()}, lambda: range(2))
    workers = {name: FakeWorkers(name, seconds, in_use) for name, seconds in steps.items()}
    groups: list[Group] = []
    assigned: dict[str, list[int]] = {name: [] for name in workers}
    for name, each in workers.items():
        each.reporter = pool.observed(name, Reporter())

        def emit(event: Event, name: str = name) -> None:
            if isinstance(event, WorkersAssigned):
                assigned[name].append(event.workers)

        groups.append(PooledGroup(each, pool, Reporter(emit)))
    store, ending = PhaseStore(tmp_path, Lease.acquire(tmp_path)), threading.Event()
    assert not run_groups(three(), groups, store, LabelExchange(three(), store, ending), Reporter())
    assert not in_use
    for number, labels in enumerate(labels_of(tmp_path)):
        np.testing.assert_allclose(labels, ord("b") + number)
    assert 2 in workers["a"].numbers, "the slowest group took no worker of the others"
    assert 2 in assigned["a"]
    for numbers in assigned.values():
        assert numbers.count(0) == 3 and numbers[-1] == 0, "workers that were released after a phase were not reported"
        assert all(number != following for number, following in pairwise(numbers))


def test_a_group_exchanges_a_slot_that_will_be_lost(three: MakeRecipe, tmp_path: Path) -> None:
    """Slot 0 is usable until the first group has taken steps on it, as one of a node that Ray begins to drain."""
    usable, in_use = [0, 1], dict[int, str]()

    class Drained(FakeWorkers):
        def train(
            self, phase: Phase, labels: StoredScores, should_pause: Callable[[], bool] = lambda: False
        ) -> PhaseResult | None:
            def drains() -> bool:
                if self._done_steps == STEPS // 2 and 0 in usable:
                    usable.remove(0)
                return 0 in self._slots and 0 not in usable

            return super().train(phase, labels, lambda: should_pause() or drains())

    pool = WorkerPool({name: make_member(0.0001, (1,)) for name in "abc"}, lambda: usable)
    groups: list[Group] = [PooledGroup(Drained(name, 0.0001, in_use), pool, Reporter()) for name in "abc"]
    store = PhaseStore(tmp_path, Lease.acquire(tmp_path))
    assert not run_groups(three(), groups, store, LabelExchange(three(), store, threading.Event()), Reporter())
    assert usable == [1] and not in_use
    for number, labels in enumerate(labels_of(tmp_path)):
        np.testing.assert_allclose(labels, ord("b") + number)


def test_a_group_continues_in_other_slots_after_a_node_was_lost(three: MakeRecipe, tmp_path: Path) -> None:
    """Group a loses a node while it trains its first cross-encoder. When it scores, that node is back, and it loses the other."""
    usable = [0, 1]
    losses: list[str] = []

    class LosesNodes(FakeWorkers):
        def lose(self, activity: str, phase: Phase) -> None:
            assert set(self._slots) <= set(usable)
            if self.name == "a" and phase == Phase(1) and activity not in losses:
                losses.append(activity)
                usable[:] = [slot for slot in (0, 1) if slot not in self._slots]
                raise SlotsLost

        def train(
            self, phase: Phase, labels: StoredScores, should_pause: Callable[[], bool] = lambda: False
        ) -> PhaseResult | None:
            self.lose("training", phase)
            return super().train(phase, labels, should_pause)

        def score(self, phase: Phase) -> Scores:
            self.lose("scoring", phase)
            return super().score(phase)

    in_use: dict[int, str] = {}
    pool = WorkerPool({name: make_member(0.0001, (1,)) for name in "abc"}, lambda: usable)
    events: list[Event] = []
    groups: list[Group] = [
        PooledGroup(LosesNodes(name, 0.0001, in_use), pool, Reporter(events.append if name == "a" else ignore))
        for name in "abc"
    ]
    store = PhaseStore(tmp_path, Lease.acquire(tmp_path))
    assert not run_groups(three(), groups, store, LabelExchange(three(), store, threading.Event()), Reporter())
    assert losses == ["training", "scoring"] and not in_use
    for number, labels in enumerate(labels_of(tmp_path)):
        np.testing.assert_allclose(labels, ord("b") + number)
    assert [event.text for event in events if isinstance(event, LogMessage)] == [
        "lost a node in cycle-1-cross; other shared workers continue",
        "continuing cycle-1-cross with 1 workers",
    ] * 2
    activities = [event.activity for event in events if isinstance(event, GroupActivity)]
    assert [activity for activity in activities if activity != "waiting"] == ["training", "scoring"]


@pytest.mark.parametrize(
    ("error", "is_dropped"),
    [
        (WorkersLostError("lost"), True),
        (DivergedError("diverged"), True),
        (OutOfMemoryError("too large"), True),
        (StorageWriteError("disk full"), False),
        (ObjectStorageError("not reached"), False),
        (RunTakenOverError("taken over"), False),
        (WorkFailedError("OSError"), False),
    ],
)
def test_only_errors_of_a_group_drop_it(
    three: MakeRecipe, tmp_path: Path, error: DistcseError, is_dropped: bool
) -> None:
    class Fails(FakeWorkers):
        def score(self, phase: Phase) -> Scores:
            raise error

    in_use, ending = dict[int, str](), threading.Event()
    reporter = Reporter(stop_requested=ending.is_set)
    pool = WorkerPool({name: make_member(0.0001, (1,)) for name in "abc"}, lambda: range(1))
    groups: list[Group] = [
        PooledGroup((Fails if name == "b" else FakeWorkers)(name, 0.0001, in_use), pool, reporter) for name in "abc"
    ]
    recipe = three("mutual.on_failure=drop")
    store = PhaseStore(tmp_path, Lease.acquire(tmp_path))
    exchange = LabelExchange(recipe, store, ending)
    with nullcontext() if is_dropped else fails_with(type(error), str(error)):
        assert not run_groups(recipe, groups, store, exchange, Reporter())
    assert list(store.dropped) == ["b"] * is_dropped and not in_use
    if is_dropped:
        np.testing.assert_allclose(labels_of(tmp_path)[2], ord("b") + 2)


def nodes_of(*resources: dict[str, float]) -> list[Node]:
    return [Node(str(number), each, {}) for number, each in enumerate(resources)]


@pytest.mark.parametrize(
    ("nodes", "overrides", "number", "each"),
    [
        (({"CPU": 2.0},), (), 2, {"CPU": 1.0}),
        (({"CPU": 16.0},), (), 3, {"CPU": 5.3}),
        (({"CPU": 16.0},), tuple(f"groups.{n}.cpus_per_worker=2" for n in range(3)), 8, {"CPU": 2.0}),
        (({"CPU": 16.0},), ("mutual.shared_workers=4",), 4, {"CPU": 4.0}),
        (({"CPU": 16.0, "GPU": 4.0}, {"CPU": 64.0}), (), 4, {"CPU": 4.0, "GPU": 1.0}),
        (({"CPU": 16.0, "GPU": 4.0},), ("resources.gpu=none",), 3, {"CPU": 5.3}),
    ],
)
def test_shared_workers_fit_the_cluster(
    three: MakeRecipe,
    nodes: tuple[dict[str, float], ...],
    overrides: tuple[str, ...],
    number: int,
    each: dict[str, float],
) -> None:
    recipe = three("ray=true", "mutual.shared_workers=auto", *overrides)
    plan = plan_groups(recipe, recipe.groups, nodes_of(*nodes))
    assert (plan.shared_workers, plan.per_worker) == (number, [each] * 3)


def test_a_cluster_without_room_for_a_group_is_refused(three: MakeRecipe) -> None:
    recipe = three("ray=true", "mutual.shared_workers=2", "groups.1.workers=4")
    with fails_with(ClusterTooSmallError, "4 of 2 shared workers", "groups.N.workers"):
        plan_groups(recipe, recipe.groups, nodes_of({"CPU": 2.0}))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("groups.0.cpus_per_worker=2", "differ in cpus_per_worker"),
        ("groups.0.node_labels={role: a}", "differ in node_labels"),
    ],
)
def test_settings_that_contradict_are_refused(three: MakeRecipe, override: str, message: str) -> None:
    with fails_with(InvalidValueError, message):
        three("mutual.shared_workers=auto", override)


def test_larger_models_take_more_workers(three: MakeRecipe, tmp_path: Path, sentences: list[str]) -> None:
    large = make_encoder(tmp_path / "large", "bert", sentences, layers=8)
    overrides = (f"groups.1.backbone={large}", "groups.2.layers=[0]", "mutual.shared_workers=auto")
    recipe = with_max_workers(three(*overrides), Reporter())
    assert [group.max_workers for group in recipe.groups] == [2, 8, 1]
    assert with_max_workers(recipe, Reporter()) == recipe
    assert with_max_workers(three(), Reporter()) == three()
