"""Mutual distillation on a Ray cluster while actors and drivers are killed, stopped or wait for resources."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.errors import OutOfMemoryError
from distcse.events import Event, GroupActivity, GroupEvent, LogMessage, Reporter, StepReport
from distcse.recipe import LoopSection, MutualRecipe
from distcse.report.history import read_run
from distcse.runs.mutual.phase_store import GroupContext, Kind
from distcse.runs.mutual.result import MutualResult
from tests.backends import run_mutual
from tests.kills import CpuHolder, kill_actor
from tests.pairs import assert_same_labels, make_mutual_recipe

pytestmark = pytest.mark.cluster
MakeRecipe = Callable[..., MutualRecipe]
LONG = ("cross.epochs=20", "bi.epochs=20", "evaluation.eval_steps=20", "mutual.cycles=1")
SHORT = ("cross.epochs=4", "bi.epochs=4")
ON_RAY = ("ray=true", "groups.0.cpus_per_worker=1", "groups.1.cpus_per_worker=1")


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    return lambda *overrides: make_mutual_recipe(tmp_path, models, sentences, *LONG, *overrides)


@pytest.mark.slow
def test_groups_with_killed_and_hanging_actors_have_the_labels_of_an_uninterrupted_run(
    recipe_with: MakeRecipe, cluster: None
) -> None:
    """One group is disturbed in each phase. `max_failures` counts each phase anew.

    Ray restarts a killed event channel, without a restart of the group.
    """
    uninterrupted = run_mutual(recipe_with(), Reporter())
    disturbed_actors: list[str] = []
    warnings: list[str] = []

    def strike(event: Event) -> None:
        """Kill and stop actors of one group: in each phase its trainer, then its scorer."""
        if not isinstance(event, GroupEvent) or event.group != "bert":
            return
        inner = event.event
        if isinstance(inner, LogMessage) and inner.warning:
            warnings.append(inner.text)
        number = len(disturbed_actors)
        is_training = isinstance(inner, StepReport)
        is_scoring = isinstance(inner, GroupActivity) and inner.activity == "scoring" and inner.phase != "start"
        if number == 0 and is_training and kill_actor("EventActor"):
            disturbed_actors.append("event channel")
        elif number == 1 and isinstance(inner, StepReport) and inner.step >= 30:
            assert not warnings and kill_actor("TrainingActor", named="-bert-")
            disturbed_actors.append("trainer")
        elif number == 2 and is_scoring and kill_actor("ScoringActor", named="-bert-"):
            disturbed_actors.append("scorer")
        elif number == 3 and is_training and kill_actor("TrainingActor", signal.SIGSTOP, "-bert-"):
            disturbed_actors.append("hanging trainer")
        elif number == 4 and is_scoring and kill_actor("ScoringActor", signal.SIGSTOP, "-bert-"):
            disturbed_actors.append("hanging scorer")

    limits = ("mutual.max_failures=1", "mutual.heartbeat_timeout_s=10")
    disturbed = run_mutual(recipe_with(*ON_RAY, *limits), Reporter(strike))
    assert len(disturbed_actors) == 5
    assert [text.partition(",")[0].partition(";")[0] for text in warnings] == [
        "lost a worker in cycle-1-cross",
        "lost a scorer in cycle-1-cross",
        "trainer 0 of group bert",
        "lost a worker in cycle-1-bi",
        "scorer 0 of group bert",
        "lost a scorer in cycle-1-bi",
    ]
    assert all("10 s (mutual.heartbeat_timeout_s)" in text for text in warnings if "of group" in text)
    assert_same_labels(uninterrupted.directory.path, disturbed.directory.path)
    cycles = read_run(disturbed.directory.path).cycles
    assert cycles is not None
    for phase in ("cycle-1-cross", "cycle-1-bi"):
        spans = [span for span in cycles.spans if (span.phase, span.activity) == (phase, "training")]
        bert, roberta = (next(span for span in spans if span.group == name) for name in ("bert", "roberta"))
        assert bert.begin < roberta.end and roberta.begin < bert.end, "groups do not train in parallel"


@pytest.mark.parametrize("other", ["waits for resources", pytest.param("has a hanging scorer", marks=pytest.mark.slow)])
def test_ctrl_c_ends_a_run_in_which_a_group_waits_for_another(
    recipe_with: MakeRecipe, cluster: None, other: str
) -> None:
    """The other group would never finish: no CPU becomes free, and no worker is restarted in time."""
    import ray

    hangs = other == "has a hanging scorer"
    waiting: list[str] = []
    lost: list[str] = []
    holder = ray.remote(CpuHolder).options(num_cpus=0 if hangs else 5).remote()
    ray.get(holder.is_ready.remote())

    def on_event(event: Event) -> None:
        if isinstance(event, GroupEvent) and isinstance(event.event, LogMessage) and "lost" in event.event.text:
            lost.append(event.event.text)
        if not isinstance(event, GroupEvent) or not isinstance(event.event, GroupActivity):
            return
        activity = event.event
        if hangs and (event.group, activity.phase, activity.activity) == ("roberta", "cycle-1-cross", "scoring"):
            assert kill_actor("ScoringActor", signal.SIGSTOP, "-roberta-")
        if activity.activity == "waiting" and activity.phase_index == (2 if hangs else 1):
            waiting.append(event.group)

    try:
        stopped = run_mutual(recipe_with(*SHORT, *ON_RAY), Reporter(on_event, lambda: bool(waiting)))
    finally:
        ray.kill(holder)
    assert stopped.interrupted and not stopped.best and not lost


class OutOfMemoryOnce(GroupContext):
    """Lets the first training of the group roberta run out of memory once."""

    def section(self, kind: Kind) -> LoopSection:
        flag = self.run.path / "was-out-of-memory"
        if self.group.name == "roberta" and not flag.exists():
            flag.touch()
            raise OutOfMemoryError("a training step ran out of memory")
        return super().section(kind)


@pytest.mark.slow
def test_two_workers_of_a_group_equal_one_even_if_one_is_killed(
    recipe_with: MakeRecipe, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed worker makes the other fail in its next collective operation, which must not count as the user's error. A killed
    scorer repeats its part alone: the other one keeps its process and its result. A group without memory continues."""
    killed: list[str] = []
    lost: list[str] = []
    out_of_memory: list[str] = []

    def kill(event: Event) -> None:
        if not isinstance(event, GroupEvent):
            return
        inner = event.event
        if isinstance(inner, LogMessage) and event.group == "roberta":
            out_of_memory.append(inner.text)
        if event.group != "bert":
            return
        if isinstance(inner, LogMessage):
            lost.append(inner.text)
        if isinstance(inner, StepReport) and not killed:
            assert kill_actor("TrainingActor", named=r"^trainer-.*-bert-.*-1$")
            killed.append("trainer")
        if isinstance(inner, GroupActivity) and inner.activity == "scoring" and killed == ["trainer"]:
            assert kill_actor("ScoringActor", named=r"^scorer-.*-bert-.*-1$")
            killed.append("scorer")

    no_dropout = [*SHORT, *(f"groups.{number}.dropout=0.0" for number in (0, 1))]
    one = run_mutual(recipe_with(*no_dropout), Reporter())
    deepspeed = ("groups.0.workers=2", "bi.engine=deepspeed", "bi.zero_stage=1")
    monkeypatch.setattr("distcse.runs.mutual.experiment.GroupContext", OutOfMemoryOnce)
    two = run_mutual(recipe_with(*no_dropout, *ON_RAY, *deepspeed), Reporter(kill))
    assert killed == ["trainer", "scorer"] and len(lost) == 2
    assert "lost a worker in cycle-1-cross" in lost[0] and "lost a scorer in cycle-1-cross" in lost[1]
    assert len(out_of_memory) == 1 and "out of memory in cycle-1-cross" in out_of_memory[0]
    assert _count_actors(two, r"^scorer-.*-bert-.*-0$") == 2, (
        "the surviving scorer was restarted, not only by the lost trainer"
    )
    assert _count_actors(two, r"^scorer-.*-bert-.*-1$") == 3
    assert_same_labels(one.directory.path, two.directory.path, tolerance=5e-3)


def _count_actors(result: MutualResult, name: str) -> int:
    """Count the actors with such a name that a run has started, ended ones included."""
    from ray.util.state import list_actors

    run = result.directory.path.name
    return sum(run in actor.name and bool(re.search(name, actor.name)) for actor in list_actors(limit=1000))
