"""A mutual distillation that is asked to stop: no group waits on, and the run resumes to the same labels."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcse.events import Event, GroupActivity, GroupEvent, Reporter
from distcse.experiments.mutual import MutualResult, run_mutual
from distcse.experiments.mutual.group import LocalGroup, SerializedGroup
from distcse.experiments.mutual.label_exchange import LabelExchange, RunEnded
from distcse.experiments.mutual.phase_store import PhaseStore
from distcse.experiments.mutual.phase_trainer import GroupContext, PairScorer
from distcse.experiments.mutual.phases import Phase
from distcse.experiments.mutual.run import _side_by_side
from distcse.recipe import MutualRecipe
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease
from tests.pairs import make_mutual_recipe

MakeRecipe = Callable[..., MutualRecipe]
SOON = 10.0
"""Seconds in which a stopped run ends; for ever was what it took."""


@pytest.fixture
def both(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    return lambda *overrides: make_mutual_recipe(tmp_path, models, sentences, *overrides)


class FakeGroup:
    """Scores at once, or as a function says.

    Args:
        name: The group's name.
        scores: Called instead of scoring.
    """

    def __init__(self, name: str, scores: Callable[[], Any] | None = None) -> None:
        self.name = name
        self._scores = scores

    def prepare(self, phase: Phase) -> None:
        pass

    def train(self, phase: Phase, labels: Any) -> None:
        raise AssertionError("labels that nobody made")

    def score(self, phase: Phase) -> Any:
        return np.zeros(3, dtype=np.float32) if self._scores is None else self._scores()

    def close(self) -> None:
        pass


class Stop:
    """A wish to stop, set when one group waits for labels."""

    def __init__(self) -> None:
        self.wished = threading.Event()

    def hear(self, event: Event) -> None:
        if (
            isinstance(event, GroupEvent)
            and isinstance(event.event, GroupActivity)
            and event.event.activity == "waiting"
        ):
            self.wished.set()

    @property
    def reporter(self) -> Reporter:
        return Reporter(self.hear, self.wished.is_set)


def side_by_side(recipe: MutualRecipe, run: Path, groups: list[Any], reporter: Reporter) -> list[bool]:
    """What `_side_by_side` returns, in a list, on a thread: where it hangs the list is empty."""
    ledger, ending = PhaseStore(run, Lease.acquire(run)), threading.Event()
    exchange = LabelExchange(recipe, ledger, ending, reporter.stop_requested)
    heard = Reporter(reporter.emit, lambda: ending.is_set() or reporter.stop_requested())
    returned: list[bool] = []
    thread = threading.Thread(
        target=lambda: returned.append(_side_by_side(recipe, groups, ledger, exchange, heard)), daemon=True
    )
    thread.start()
    thread.join(SOON)
    return returned


def test_a_group_that_ends_by_itself_wakes_the_one_that_waits_for_it(both: MakeRecipe, tmp_path: Path) -> None:
    """As one does that waits for room on the cluster."""

    def ends() -> None:
        time.sleep(0.3)
        raise RunEnded

    assert side_by_side(both(), tmp_path, [FakeGroup("bert"), FakeGroup("roberta", ends)], Reporter()) == [True]


def test_a_stop_wish_wakes_a_group_that_waits_for_one_that_does_not_hear_it(both: MakeRecipe, tmp_path: Path) -> None:
    exchange = LabelExchange(
        both(), PhaseStore(tmp_path, Lease.acquire(tmp_path)), threading.Event(), (stop := Stop()).wished.is_set
    )
    exchange.post("bert", Phase(0), np.zeros(3, dtype=np.float32), None)
    threading.Timer(0.3, stop.wished.set).start()
    with pytest.raises(RunEnded):
        exchange.labels(Phase(0))


def test_a_group_that_waits_for_its_turn_does_not_begin(both: MakeRecipe) -> None:
    done: list[str] = []
    stop, turn = Stop(), threading.Lock()
    group = SerializedGroup(FakeGroup("bert", lambda: done.append("scored")), turn, stop.wished.is_set)

    def score() -> None:
        with pytest.raises(RunEnded):
            group.score(Phase(0))
        done.append("ended")

    with turn:
        waits = threading.Thread(target=score, daemon=True)
        waits.start()
        stop.wished.set()
    waits.join(SOON)
    assert done == ["ended"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's handler of SIGINT: a shell that starts the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_leaves_no_group_waiting(both: MakeRecipe, tmp_path: Path) -> None:
    """It ends the run without the group that hangs; the one that waited has ended too."""
    hangs, recipe, stop = threading.Event(), both(), Stop()
    ledger, ending = PhaseStore(tmp_path, Lease.acquire(tmp_path)), threading.Event()
    exchange = LabelExchange(recipe, ledger, ending)  # nobody heard the first one

    def second() -> None:
        stop.wished.wait(SOON)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    groups: list[Any] = [FakeGroup("bert"), FakeGroup("roberta", hangs.wait)]
    threading.Thread(target=second, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        _side_by_side(recipe, groups, ledger, exchange, Reporter(stop.hear))
    assert ending.is_set()
    deadline = time.monotonic() + SOON
    while sum(thread.name.startswith("group") for thread in threading.enumerate()) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    hangs.set()


def labels_of(result: MutualResult) -> list[np.ndarray]:
    ledger = PhaseStore(result.directory.path)
    found = [ledger.labels(Phase(number)) for number in range(3)]
    assert all(labels is not None for labels in found)
    return [labels for labels in found if labels is not None]


def resumed(first: MutualResult) -> MutualResult:
    directory, recipe = RunDirectory.reopen(first.directory.path, [])
    assert isinstance(recipe, MutualRecipe)
    return run_mutual(recipe, Reporter(), directory)


@pytest.mark.parametrize(("activity", "phase"), [("waiting", 2), ("scoring", 0), ("scoring", 1)])
def test_a_run_that_is_stopped_while_a_group_waits_or_scores_resumes_to_the_same_labels(
    both: MakeRecipe, activity: str, phase: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny models in this process. Scores of a group that was stopped are made again."""
    undisturbed = labels_of(run_mutual(both("mutual.cycles=1"), Reporter()))
    wished: list[float] = []
    waits, score = threading.Event(), SerializedGroup.score

    def score_late(self: SerializedGroup, scored: Phase) -> Any:
        """So that the other group waits for these scores, whichever group's turn came first."""
        if (activity, self.name, scored.number) == ("waiting", "roberta", phase - 1):
            assert waits.wait(30)
        return score(self, scored)

    monkeypatch.setattr(SerializedGroup, "score", score_late)

    def hear(event: Event) -> None:
        doing = event.event if isinstance(event, GroupEvent) else event
        if isinstance(doing, GroupActivity) and (doing.activity, doing.number) == (activity, phase) and not wished:
            wished.append(time.monotonic())
            waits.set()

    first = run_mutual(both("mutual.cycles=1"), Reporter(hear, lambda: bool(wished)))
    assert first.interrupted and time.monotonic() - wished[0] < SOON
    monkeypatch.undo()
    second = resumed(first)
    assert not second.interrupted
    for ours, theirs in zip(labels_of(second), undisturbed, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_scoring_stops_after_the_forward_pass_under_way(both: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of pairs takes minutes with a large model, a forward pass less than a second."""
    recipe = both()
    directory = RunDirectory.create(recipe)
    with directory.leased(Reporter()) as lease:
        from distcse.experiments.mutual.run import _pairs

        _pairs(recipe, directory.path, Reporter())
        bench = GroupContext(recipe, 0, directory.path, lease)
        passes: list[tuple[int, int]] = []
        original = PairScorer.score

        def score(self: PairScorer, *arguments: Any, on_progress: Any, **more: Any) -> Any:
            def note(done: int, total: int) -> None:
                passes.append((done, total))
                on_progress(done, total)

            return original(self, *arguments, on_progress=note, **more)

        monkeypatch.setattr(PairScorer, "score", score)
        monkeypatch.setattr("distcse.models.encoder.by_length", lambda ids, tokens: [[n] for n in range(len(ids))])
        with pytest.raises(RunEnded):
            LocalGroup(bench, Reporter(stop_requested=lambda: len(passes) >= 2)).score(Phase(0))
    assert len(passes) == 2 and passes[-1][0] < passes[-1][1]
