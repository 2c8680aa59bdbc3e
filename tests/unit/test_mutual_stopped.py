"""Stopping a mutual distillation: no group keeps waiting, and the run resumes to the same labels."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcse.errors import StoppedEarlyError, WorkersLostError
from distcse.events import Event, GroupActivity, GroupEvent, Reporter
from distcse.recipe import MutualRecipe
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease
from distcse.runs.mutual.experiment import run_groups
from distcse.runs.mutual.group import LocalGroup, SerializedGroup
from distcse.runs.mutual.label_exchange import LabelExchange
from distcse.runs.mutual.phase_store import PhaseStore
from distcse.runs.mutual.phases import GroupContext, Phase
from distcse.runs.mutual.result import MutualResult
from distcse.runs.mutual.scoring import PairScorer
from distcse.storage import open_store
from tests.backends import run_mutual
from tests.pairs import labels_of, make_mutual_recipe

MakeRecipe = Callable[..., MutualRecipe]
TIMEOUT_S = 10.0
"""Seconds within which a stopped run must end."""


@pytest.fixture
def both(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    return lambda *overrides: make_mutual_recipe(tmp_path, models, sentences, *overrides)


class FakeGroup:
    """A group that scores at once.

    Args:
        name: The group's name.
        scores: Replaces the scoring.
    """

    def __init__(self, name: str, scores: Callable[[], Any] | None = None) -> None:
        self.name = name
        self._scores = scores

    def prepare(self, phase: Phase) -> None:
        pass

    def acquire(self, phase: Phase, has_labels: Callable[[], bool]) -> None:
        pass

    def train(self, phase: Phase, labels: Any) -> None:
        raise AssertionError("trained without labels")

    def score(self, phase: Phase) -> Any:
        return np.zeros(3, dtype=np.float32) if self._scores is None else self._scores()

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


class Stop:
    """A stop request, set when a group waits for labels."""

    def __init__(self) -> None:
        self.requested = threading.Event()

    def on_event(self, event: Event) -> None:
        if (
            isinstance(event, GroupEvent)
            and isinstance(event.event, GroupActivity)
            and event.event.activity == "waiting"
        ):
            self.requested.set()

    @property
    def reporter(self) -> Reporter:
        return Reporter(self.on_event, self.requested.is_set)


def run_in_thread(recipe: MutualRecipe, run: Path, groups: list[Any], reporter: Reporter) -> list[bool]:
    """Call `run_groups` in a thread, and return its result in a list; the list is empty if it hangs."""
    store, ending = PhaseStore(run, Lease.acquire(run)), threading.Event()
    exchange = LabelExchange(recipe, store, ending, reporter.stop_requested)
    group_reporter = Reporter(reporter.emit, lambda: ending.is_set() or reporter.stop_requested())
    returned: list[bool] = []
    thread = threading.Thread(
        target=lambda: returned.append(run_groups(recipe, groups, store, exchange, group_reporter)), daemon=True
    )
    thread.start()
    thread.join(TIMEOUT_S)
    return returned


def test_a_group_that_ends_wakes_a_group_that_waits_for_it(both: MakeRecipe, tmp_path: Path) -> None:
    """A group that waits for cluster resources ends in this way."""

    def ends() -> None:
        time.sleep(0.3)
        raise StoppedEarlyError("ended")

    assert run_in_thread(both(), tmp_path, [FakeGroup("bert"), FakeGroup("roberta", ends)], Reporter()) == [True]


def test_an_error_of_a_group_wakes_a_group_that_waits_for_it(both: MakeRecipe, tmp_path: Path) -> None:
    stop, raised = Stop(), list[WorkersLostError]()
    store, ending = PhaseStore(tmp_path, Lease.acquire(tmp_path)), threading.Event()

    def fail() -> None:
        assert stop.requested.wait(TIMEOUT_S), "the other group does not wait"
        raise WorkersLostError("group roberta lost a worker")

    def run() -> None:
        groups: list[Any] = [FakeGroup("bert"), FakeGroup("roberta", fail)]
        try:
            run_groups(both(), groups, store, LabelExchange(both(), store, ending), Reporter(stop.on_event))
        except WorkersLostError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(2 * TIMEOUT_S)
    assert not thread.is_alive() and len(raised) == 1


def test_a_stop_request_wakes_a_waiting_group_though_the_other_does_not_react(both: MakeRecipe, tmp_path: Path) -> None:
    exchange = LabelExchange(
        both(), PhaseStore(tmp_path, Lease.acquire(tmp_path)), threading.Event(), (stop := Stop()).requested.is_set
    )
    exchange.post("bert", Phase(0), np.zeros(3, dtype=np.float32), None)
    threading.Timer(0.3, stop.requested.set).start()
    with pytest.raises(StoppedEarlyError):
        exchange.labels("bert", Phase(1))


def test_a_group_that_waits_for_the_lock_does_not_start(both: MakeRecipe) -> None:
    done: list[str] = []
    stop, lock = Stop(), threading.Lock()
    group = SerializedGroup(FakeGroup("bert", lambda: done.append("scored")), lock, stop.requested.is_set)

    def score() -> None:
        with pytest.raises(StoppedEarlyError):
            group.score(Phase(0))
        done.append("ended")

    with lock:
        waits = threading.Thread(target=score, daemon=True)
        waits.start()
        stop.requested.set()
    waits.join(TIMEOUT_S)
    assert done == ["ended"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Set Python's SIGINT handler, because background processes of a shell ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_ends_waiting_groups(both: MakeRecipe, tmp_path: Path) -> None:
    """It ends the run without waiting for the group that hangs; the waiting group ends too."""
    hangs, recipe, stop = threading.Event(), both(), Stop()
    store, ending = PhaseStore(tmp_path, Lease.acquire(tmp_path)), threading.Event()
    exchange = LabelExchange(recipe, store, ending)  # without a stop request, as if nothing reacted to the first Ctrl-C

    def second() -> None:
        stop.requested.wait(TIMEOUT_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    groups: list[Any] = [FakeGroup("bert"), FakeGroup("roberta", hangs.wait)]
    threading.Thread(target=second, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_groups(recipe, groups, store, exchange, Reporter(stop.on_event))
    assert ending.is_set()
    deadline = time.monotonic() + TIMEOUT_S
    while sum(thread.name.startswith("group") for thread in threading.enumerate()) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    hangs.set()


def resumed(first: MutualResult) -> MutualResult:
    directory, recipe = RunDirectory.reopen(first.directory.path, [])
    assert isinstance(recipe, MutualRecipe)
    return run_mutual(recipe, Reporter(), directory)


@pytest.mark.parametrize(
    ("activity", "phase"), [("waiting", 2), *(pytest.param("scoring", n, marks=pytest.mark.slow) for n in (0, 1))]
)
def test_a_run_stopped_while_a_group_waits_or_scores_resumes_to_the_same_labels(
    both: MakeRecipe, activity: str, phase: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiny models in this process. A stopped group scores again after the resume."""
    uninterrupted = labels_of(run_mutual(both("mutual.cycles=1"), Reporter()).directory.path)
    stopped_at: list[GroupActivity] = []
    waits, score = threading.Event(), SerializedGroup.score

    def score_late(self: SerializedGroup, scored: Phase) -> Any:
        """Delay these scores, so that the other group waits for them regardless of the order of the groups."""
        if (activity, self.name, scored.number) == ("waiting", "roberta", phase - 1):
            assert waits.wait(30)
        return score(self, scored)

    monkeypatch.setattr(SerializedGroup, "score", score_late)

    def on_event(event: Event) -> None:
        inner = event.event if isinstance(event, GroupEvent) else event
        if (
            isinstance(inner, GroupActivity)
            and (inner.activity, inner.phase_index) == (activity, phase)
            and not stopped_at
        ):
            stopped_at.append(inner)
            waits.set()

    first = run_mutual(both("mutual.cycles=1"), Reporter(on_event, lambda: bool(stopped_at)))
    assert first.interrupted and not first.best
    monkeypatch.undo()
    second = resumed(first)
    assert not second.interrupted
    for ours, theirs in zip(labels_of(second.directory.path), uninterrupted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_scoring_stops_after_the_current_forward_pass(both: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring a slice of pairs takes minutes with a large model; a forward pass takes less than a second."""
    recipe = both()
    directory = RunDirectory.create(recipe)
    with directory.leased(Reporter()) as lease:
        from distcse.runs.mutual.pairs import load_pairs

        load_pairs(recipe, directory.path, LocalBackend(), Reporter())
        context = GroupContext(recipe, 0, open_store(directory.path, lease), {})
        passes: list[tuple[int, int]] = []
        original = PairScorer.score

        def score(self: PairScorer, *arguments: Any, on_progress: Any, **more: Any) -> Any:
            def note(done: int, total: int) -> None:
                passes.append((done, total))
                on_progress(done, total)

            return original(self, *arguments, on_progress=note, **more)

        monkeypatch.setattr(PairScorer, "score", score)
        monkeypatch.setattr("distcse.models.frozen_pass.by_length", lambda ids, *_: [[n] for n in range(len(ids))])
        with pytest.raises(StoppedEarlyError):
            LocalGroup(context, Reporter(stop_requested=lambda: len(passes) >= 2)).score(Phase(0))
    assert len(passes) == 2 and passes[-1][0] < passes[-1][1]


def test_a_run_that_stops_while_it_waits_for_nodes_decides_what_an_undisturbed_one_does(
    both: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise StoppedEarlyError("asked to stop")

    def decided(*stops_at: str) -> tuple[list[int | None], dict[str, float]]:
        """Stop a new run in one function after the other, and return its decisions and the dev scores of its starts."""
        recipe, directory = both("mutual.shared_workers=2", f"storage.runs={tmp_path / stops_at[0]}"), None
        for name in stops_at:
            with monkeypatch.context() as patch, pytest.raises(StoppedEarlyError):
                patch.setattr(f"distcse.runs.mutual.experiment.{name}", stop)
                run_mutual(recipe, Reporter(), directory)
            (folder,) = (tmp_path / stops_at[0]).iterdir()
            directory, reopened = RunDirectory.reopen(folder, [])
            assert isinstance(reopened, MutualRecipe)
            recipe = reopened
        return [group.max_workers for group in recipe.groups], dict(PhaseStore(folder).starts)

    undisturbed = decided("prepare_tokens")
    assert undisturbed[0] == [1, 1] and len(undisturbed[1]) == 2
    assert decided("waited_for_nodes", "prepare_tokens") == undisturbed
