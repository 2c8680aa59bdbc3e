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

from distcse.errors import DistcseError, StoppedEarlyError, WorkersLostError, WorkFailedError
from distcse.events import Event, GroupActivity, GroupEvent, Reporter, StageProgress, StepReport
from distcse.recipe import MutualRecipe
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease
from distcse.runs.mutual import phase_trainer
from distcse.runs.mutual.experiment import run_groups
from distcse.runs.mutual.group import Group, LocalGroup
from distcse.runs.mutual.label_exchange import LabelExchange
from distcse.runs.mutual.pairs import load_pairs
from distcse.runs.mutual.phase_store import GroupContext, Phase, PhaseResult, PhaseStore
from distcse.runs.mutual.phase_trainer import PairScorer
from distcse.storage import dump_checked_json, load_checked_json, open_store
from tests.backends import resume_mutual, run_mutual
from tests.failures import fails_with
from tests.pairs import assert_same_labels, make_mutual_recipe

MakeRecipe = Callable[..., MutualRecipe]
TIMEOUT_S = 10.0
"""Seconds within which a stopped run must end."""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    folder = tmp_path_factory.mktemp("both")
    return lambda *overrides: make_mutual_recipe(folder, models, sentences, *overrides)


SCORES = np.zeros(3, dtype=np.float32)


class FakeGroup(Group):
    """A group that trains at once, and scores by a function."""

    def __init__(self, name: str, scores: Callable[[], Any]) -> None:
        self.name, self._scores = name, scores

    def train(self, phase: Phase, labels: Any) -> PhaseResult:
        return PhaseResult(1, 50.0, 1)

    def score(self, phase: Phase) -> Any:
        return self._scores()


class FakeRun:
    """A run of two groups: bert scores at once, and waits for the scores of roberta."""

    def __init__(self, recipe: MutualRecipe, folder: Path, roberta: Callable[[], Any] = lambda: SCORES) -> None:
        self._recipe = recipe
        self._groups: list[Any] = [FakeGroup("bert", lambda: SCORES), FakeGroup("roberta", roberta)]
        self.store = PhaseStore(open_store(folder, Lease.acquire(open_store(folder))))
        self.ending, self.waits, self.stop = (threading.Event() for _ in range(3))
        """Set when the run ends, when a group waits for labels, and to request a stop."""
        self.exchange = LabelExchange(recipe, self.store, self.ending, self.stop.is_set)

    def __call__(self) -> bool:
        def on_event(event: Event) -> None:
            if isinstance(event, GroupEvent) and getattr(event.event, "activity", "") == "waiting":
                self.waits.set()

        return run_groups(self._recipe, self._groups, self.store, self.exchange, Reporter(on_event))


@pytest.mark.parametrize("error", [StoppedEarlyError("ended"), WorkersLostError("group roberta lost a worker")])
def test_a_group_that_ends_wakes_one_that_waits_for_it(both: MakeRecipe, tmp_path: Path, error: DistcseError) -> None:
    """A group that waits for cluster resources ends without an error of the run."""
    ended: list[bool | DistcseError] = []

    def end() -> None:
        assert run.waits.wait(TIMEOUT_S)
        raise error

    def work() -> None:
        try:
            ended.append(run())
        except DistcseError as failed:
            ended.append(failed)

    run = FakeRun(both(), tmp_path, end)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert ended == [True if isinstance(error, StoppedEarlyError) else error]


def test_a_stop_request_wakes_a_waiting_group_though_the_other_does_not_react(both: MakeRecipe, tmp_path: Path) -> None:
    run = FakeRun(both(), tmp_path)
    run.exchange.post("bert", Phase(0), SCORES, None)
    threading.Timer(0.1, run.stop.set).start()
    with pytest.raises(StoppedEarlyError):
        run.exchange.labels("bert", Phase(1))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Set Python's SIGINT handler, because background processes of a shell ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_ends_waiting_groups(both: MakeRecipe, tmp_path: Path) -> None:
    """It ends the run without waiting for the group that hangs; the waiting group ends too."""
    hangs = threading.Event()
    run = FakeRun(both(), tmp_path, hangs.wait)  # without a stop request, as if nothing reacted to the first Ctrl-C

    def second() -> None:
        run.waits.wait(TIMEOUT_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=second, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run()
    assert run.ending.is_set()
    deadline = time.monotonic() + TIMEOUT_S
    while sum(thread.name.startswith("group") for thread in threading.enumerate()) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    hangs.set()


def test_groups_in_one_process_take_turns_and_name_their_errors(
    both: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that waits for its turn does not start once a stop is requested."""
    stop, lock, done = threading.Event(), threading.Lock(), list[str]()

    def fail(*arguments: object, **options: object) -> None:
        done.append("scored")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PairScorer, "score", fail)
    recipe = both()
    context = GroupContext(recipe, 0, open_store(RunDirectory.create(recipe).path), {})
    group = LocalGroup(context, Reporter(stop_requested=stop.is_set), lock)
    with fails_with(WorkFailedError, "bert", "cycle-1-cross", "OSError", "No space left on device"):
        group.score(Phase(1))

    def score() -> None:
        with pytest.raises(StoppedEarlyError):
            group.score(Phase(0))
        done.append("ended")

    with lock:
        waits = threading.Thread(target=score, daemon=True)
        waits.start()
        stop.set()
    waits.join(TIMEOUT_S)
    assert done == ["scored", "ended"]


# -- runs of real models --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(both: MakeRecipe) -> Path:
    """The folder of a run that nothing stops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(phase_trainer.PAIRS_PER_SHARD, "cpu", 20)
        return run_mutual(both("mutual.cycles=1"), Reporter()).directory.path


@pytest.mark.parametrize(
    ("phase", "stopped_at"),
    [
        ("cycle-1-cross", StepReport),
        pytest.param("cycle-1-cross", StageProgress("scoring", 20, 60, "pairs"), marks=pytest.mark.slow),
        ("cycle-1-bi", GroupActivity("cycle-1-bi", "waiting", ["roberta"], 2)),
        pytest.param("start", GroupActivity("start", "scoring", phase_index=0), marks=pytest.mark.slow),
        pytest.param("cycle-1-bi", StepReport, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_resumes_to_the_same_labels(
    both: MakeRecipe, undisturbed: Path, phase: str, stopped_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped group continues from its checkpoint, and scores the shards that are not stored."""
    waits, stop, phases = threading.Event(), threading.Event(), dict[str, str]()
    scored, score_shard, score = list[str](), PairScorer.score_shard, LocalGroup.score
    monkeypatch.setitem(phase_trainer.PAIRS_PER_SHARD, "cpu", 20)
    monkeypatch.setattr(phase_trainer, "REPORT_S", 0.0)
    if "waiting" not in str(stopped_at):
        waits.set()

    def note(self: PairScorer, model: Any, scored_phase: Phase, *rest: Any) -> Any:
        scored.append(scored_phase.name)
        return score_shard(self, model, scored_phase, *rest)

    def score_late(self: LocalGroup, scored_phase: Phase) -> Any:
        """Delay roberta's scores of phase 1, so that bert waits for them regardless of the order of the groups."""
        assert (self.name, scored_phase.number) != ("roberta", 1) or waits.wait(30)
        return score(self, scored_phase)

    monkeypatch.setattr(PairScorer, "score_shard", note)
    monkeypatch.setattr(LocalGroup, "score", score_late)

    def on_event(event: Event) -> None:
        if not isinstance(event, GroupEvent):
            return
        if isinstance(event.event, GroupActivity):
            phases[event.group] = event.event.phase
        if phases[event.group] == phase and stopped_at in (event.event, type(event.event)):
            stop.set()
            waits.set()

    first = run_mutual(both("mutual.cycles=1"), Reporter(on_event, stop.is_set))
    assert first.interrupted and first.evaluation is None and not first.best
    assert not resume_mutual(first.directory.path).interrupted
    assert_same_labels(first.directory.path, undisturbed, tolerance=0)
    assert not list(first.directory.path.glob("groups/*/*/scores")), "shards of posted scores remain"
    assert len(scored) == 3 * 2 * 3, "a shard was scored twice"


def test_scoring_stops_after_the_current_forward_pass(both: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring a slice of pairs takes minutes with a large model; a forward pass takes less than a second."""
    recipe = both()
    directory = RunDirectory.create(recipe)
    load_pairs(recipe, open_store(directory.path), LocalBackend(), Reporter())
    context = GroupContext(recipe, 0, open_store(directory.path, Lease.acquire(open_store(directory.path))), {})
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
        LocalGroup(context, Reporter(stop_requested=lambda: len(passes) >= 2), threading.Lock()).score(Phase(0))
    assert len(passes) == 2 and passes[-1][0] < passes[-1][1]


def stop(*arguments: object, **options: object) -> None:
    """Replace a function of a run, which is stopped there."""
    raise StoppedEarlyError("asked to stop")


def test_a_run_that_stops_while_it_waits_for_nodes_decides_what_an_undisturbed_one_does(
    both: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decided(*stops_at: str) -> tuple[list[Any], dict[str, float]]:
        """Stop a new run in one function after the other, and return its decisions and the dev scores of its starts."""
        runs = tmp_path / stops_at[0]
        for name in stops_at:
            with monkeypatch.context() as patch, pytest.raises(StoppedEarlyError):
                patch.setattr(f"distcse.runs.mutual.experiment.{name}", stop)
                if runs.exists():
                    resume_mutual(*runs.iterdir())
                else:
                    run_mutual(both("mutual.shared_workers=2", f"storage.runs={runs}"), Reporter())
        (folder,) = runs.iterdir()
        groups = RunDirectory.reopen(folder, [])[1].model_dump()["groups"]
        return [group["max_workers"] for group in groups], dict(PhaseStore(open_store(folder)).starts)

    undisturbed = decided("prepare_tokens")
    assert undisturbed[0] == [1, 1] and len(undisturbed[1]) == 2
    assert decided("waited_for_nodes", "prepare_tokens") == undisturbed


def test_a_resumed_run_scores_the_starts_again_that_its_labels_are_weighed_by(
    both: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One was lost, as if the driver had been killed before it was recorded."""
    monkeypatch.setattr("distcse.runs.mutual.experiment.prepare_tokens", stop)
    recipe = both("mutual.standardize=true", "mutual.weigh_by=group_and_dev")
    with pytest.raises(StoppedEarlyError):
        run_mutual(recipe, Reporter())
    folder = max(Path(recipe.storage.runs).iterdir(), key=lambda run: run.stat().st_mtime_ns)
    state = load_checked_json(folder / "phases.json")
    starts = dict(state["starts"])
    assert set(starts) == {"bert", "roberta"}
    del state["starts"]["bert"]
    (folder / "phases.json").write_text(dump_checked_json(state))
    with pytest.raises(StoppedEarlyError):
        resume_mutual(folder)
    assert PhaseStore(open_store(folder)).starts == starts
