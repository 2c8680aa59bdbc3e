"""Groups of actors on a real Ray cluster: side by side, killed one by one, and a driver that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from distcse.errors import RunError
from distcse.events import Event, GroupActivity, GroupEvent, LogMessage, Reporter, StepReport
from distcse.experiments.mutual import MutualResult, run_mutual
from distcse.experiments.mutual.phase_store import PhaseStore
from distcse.experiments.mutual.phases import Phase
from distcse.recipe import MutualRecipe
from distcse.report.history import read_run
from distcse.runs.directory import RunDirectory
from tests.conftest import ROOT
from tests.kills import kill_actor
from tests.pairs import make_mutual_recipe

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MakeRecipe = Callable[..., MutualRecipe]
LONG = ("cross.epochs=20", "bi.epochs=20", "evaluation.eval_steps=20", "mutual.cycles=1")
SHORT = ("cross.epochs=4", "bi.epochs=4")
ON_RAY = ("ray=true", "groups.0.cpus_per_worker=1", "groups.1.cpus_per_worker=1")


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    return lambda *overrides: make_mutual_recipe(tmp_path, models, sentences, *LONG, *overrides)


def labels_of(run: Path) -> list[np.ndarray]:
    ledger = PhaseStore(run)
    found = [ledger.labels(Phase(number)) for number in range(3)]
    assert all(labels is not None for labels in found)
    return [labels for labels in found if labels is not None]


def assert_same_labels(one: MutualResult, other: MutualResult) -> None:
    for number, (a, b) in enumerate(zip(labels_of(one.directory.path), labels_of(other.directory.path), strict=True)):
        np.testing.assert_allclose(a, b, atol=1e-4, err_msg=Phase(number).name)


def test_side_by_side_and_killed_they_make_the_labels_of_an_undisturbed_run(
    recipe_with: MakeRecipe, cluster: None
) -> None:
    """A killed event channel is started again by Ray: it costs no restart of the group."""
    undisturbed = run_mutual(recipe_with(), Reporter())
    killed: list[str] = []
    lost: list[str] = []

    def kill(event: Event) -> None:
        if not isinstance(event, GroupEvent):
            return
        if isinstance(event.event, LogMessage) and event.event.text.startswith("lost a worker"):
            lost.append(event.event.text)
        if isinstance(event.event, StepReport) and not killed and kill_actor("EventActor"):
            killed.append("board")
        elif isinstance(event.event, StepReport) and event.event.step >= 30 and killed == ["board"]:
            assert not lost and kill_actor("TrainingActor")
            killed.append("trainer")
        scoring = (
            isinstance(event.event, GroupActivity)
            and event.event.activity == "scoring"
            and event.event.phase != "start"
        )
        if scoring and killed == ["board", "trainer"] and kill_actor("ScoringActor"):
            killed.append("scorer")

    disturbed = run_mutual(recipe_with(*ON_RAY), Reporter(kill))
    assert killed == ["board", "trainer", "scorer"] and len(lost) == 2
    assert_same_labels(undisturbed, disturbed)
    cycles = read_run(disturbed.directory.path).cycles
    assert cycles is not None
    for kind in ("cross", "bi"):
        mine, theirs = (
            next(s for s in cycles.spans if (s.group, s.phase, s.activity) == (name, f"cycle-1-{kind}", "training"))
            for name in ("bert", "roberta")
        )
        assert mine.begin < theirs.end and theirs.begin < mine.end  # at the same time


def test_drivers_that_are_stopped_and_killed_are_followed_by_ones_that_go_on(
    recipe_with: MakeRecipe, tmp_path: Path
) -> None:
    """SIGTERM while cross-encoders train; the next driver is killed while bi-encoders do; the last one comes to the end."""
    undisturbed = run_mutual(recipe_with(), Reporter())
    recipe_with(*ON_RAY)
    arguments = [str(tmp_path / "recipe.yaml"), *LONG, *ON_RAY, "cross.log_every=1", "bi.log_every=1"]
    run = _until(arguments, "cycle-1-cross", signal.SIGTERM)
    assert _until(["--resume", str(run)], "cycle-1-bi", signal.SIGKILL) == run
    directory, recipe = RunDirectory.reopen(run, ["ray=false"])
    assert isinstance(recipe, MutualRecipe)
    resumed = run_mutual(recipe, Reporter(), directory)
    assert resumed.best and not resumed.interrupted
    assert_same_labels(undisturbed, resumed)


def _until(arguments: list[str], phase: str, stop: signal.Signals) -> Path:
    """Start `distcse.train` and send it a signal once a group has taken a step of a phase; the run's folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "distcse.train", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**kept, "NO_COLOR": "1"},
        cwd=ROOT,
    )
    assert process.stderr is not None
    run = None
    for line in process.stderr:
        if "run directory" in line:
            run = Path(line.split()[-1])
        if run is not None and f"{phase} training" in line:
            _wait_for_steps(run, phase)
            break
    process.send_signal(stop)
    _, told = process.communicate(timeout=120)
    assert run is not None and process.returncode == (130 if stop == signal.SIGTERM else -stop), told
    return run


def _wait_for_steps(run: Path, phase: str) -> None:
    """Until a group has taken a step of a phase."""
    for _ in range(600):
        begun: dict[str, str] = {}
        for line in (run / "events.jsonl").read_text().splitlines():
            event: Mapping[str, str] = json.loads(line)
            if event["event"] == "Doing":
                begun[event["group"]] = event["phase"]
            if event["event"] == "Steps" and begun.get(event["group"]) == phase:
                return
        time.sleep(0.1)
    raise AssertionError(f"no step of {phase}")


@pytest.mark.parametrize("other", ["waits for room", "has a scorer that hangs"])
def test_ctrl_c_ends_a_run_in_which_a_group_waits_for_another(
    recipe_with: MakeRecipe, cluster: None, other: str
) -> None:
    """What the other does it would do for ever."""
    import ray

    wished: list[float] = []
    holder = ray.remote(Holder).options(num_cpus=5 if other == "waits for room" else 0).remote()
    ray.get(holder.holds.remote())

    def hear(event: Event) -> None:
        if not isinstance(event, GroupEvent) or not isinstance(event.event, GroupActivity):
            return
        doing, hangs = event.event, other == "has a scorer that hangs"
        if hangs and (event.group, doing.phase, doing.activity) == ("roberta", "cycle-1-cross", "scoring"):
            assert kill_actor("ScoringActor", signal.SIGSTOP, "roberta")
        if doing.activity == "waiting" and doing.number == (2 if hangs else 1):
            wished.append(time.monotonic())

    try:
        stopped = run_mutual(recipe_with(*SHORT, *ON_RAY), Reporter(hear, lambda: bool(wished)))
    finally:
        ray.kill(holder)
    assert stopped.interrupted and not stopped.best
    assert time.monotonic() - wished[0] < 10


class Holder:
    """An actor that has CPUs and does nothing with them."""

    def holds(self) -> bool:
        return True


def test_a_group_that_keeps_failing(recipe_with: MakeRecipe, cluster: None) -> None:
    def kill(event: Event) -> None:
        if isinstance(event, GroupEvent) and event.group == "bert" and isinstance(event.event, StepReport):
            kill_actor("TrainingActor")

    alone = (*SHORT, *ON_RAY, "mutual.max_failures=0")
    with pytest.raises(RunError, match=r"group (bert|roberta) lost a worker 1 times, the last time in cycle-1-cross"):
        run_mutual(recipe_with(*alone), Reporter(kill))
    dropped = run_mutual(recipe_with(*alone, "mutual.on_failure=drop"), Reporter(_once(kill)))
    assert len(dropped.dropped) == 1 and len({best.group for best in dropped.best}) == 1


def _once(kill: Callable[[Event], None]) -> Callable[[Event], None]:
    done: list[Event] = []

    def once(event: Event) -> None:
        if not done and isinstance(event, GroupEvent) and event.group == "bert" and isinstance(event.event, StepReport):
            done.append(event)
            kill(event)

    return once


def test_two_workers_of_a_group_learn_what_one_does(recipe_with: MakeRecipe, cluster: None) -> None:
    """Though the second is killed, which makes the first one fail in its next collective: that is no mistake of the user's."""
    told: list[Event] = []

    def kill(event: Event) -> None:
        told.append(event)
        if (
            isinstance(event, GroupEvent)
            and event.group == "bert"
            and isinstance(event.event, StepReport)
            and not killed
        ):
            killed.append(kill_actor("TrainingActor", named=r"^trainer-.*bert.*-1$"))

    killed: list[bool] = []
    still = [*SHORT, *(f"groups.{number}.dropout=0.0" for number in (0, 1))]
    one = run_mutual(recipe_with(*still), Reporter())
    deepspeed = ("groups.0.workers=2", "bi.engine=deepspeed", "bi.zero_stage=1")
    two = run_mutual(recipe_with(*still, *ON_RAY, *deepspeed), Reporter(kill))
    lost = [event.event.text for event in told if isinstance(event, GroupEvent) and isinstance(event.event, LogMessage)]
    assert killed == [True] and lost == ["lost a worker in cycle-1-cross; started again from its last checkpoint"]
    for a, b in zip(labels_of(one.directory.path), labels_of(two.directory.path), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-3)


def test_more_than_the_cluster_has_is_refused_at_once(recipe_with: MakeRecipe, cluster: None) -> None:
    with pytest.raises(
        RunError, match=r"the run needs 65 CPUs at the same time .*, the cluster has 6; lower groups\.N"
    ):
        run_mutual(recipe_with(*ON_RAY, "groups.0.cpus_per_worker=64"), Reporter())
