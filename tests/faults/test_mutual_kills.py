"""Mutual distillation on a Ray cluster while actors and drivers are killed, stopped or wait for resources."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from distcse.errors import OutOfMemoryError, WorkersLostError
from distcse.events import Event, GroupActivity, GroupEvent, LogMessage, Reporter, StepReport
from distcse.recipe import LoopSection, MutualRecipe, with_values
from distcse.report.history import read_run
from distcse.runs.directory import RunDirectory
from distcse.runs.mutual.phase_store import GroupContext, Kind
from tests.backends import run_mutual
from tests.commands import TRAIN, user_environment
from tests.conftest import ROOT
from tests.failures import fails_with
from tests.kills import CpuHolder, Nodes, actor_names, kill_actor
from tests.models import make_encoder
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
    scorers = [len(actor_names(f"^scorer-{two.directory.path.name}-bert-.*-{number}$")) for number in (0, 1)]
    assert scorers == [2, 3], "the surviving scorer was restarted, not only by the lost trainer"
    assert_same_labels(one.directory.path, two.directory.path, tolerance=5e-3)


# -- shared workers ------------------------------------------------------------------------------------------------------


TWO_SHARED = {"ray": True, "mutual.shared_workers": 2, **{f"groups.{number}.cpus_per_worker": 1 for number in range(3)}}


class LateGroup(GroupContext):
    """Lets the group bert train its first cross-encoder only when the others wait for it."""

    def section(self, kind: Kind) -> LoopSection:
        deadline = time.monotonic() + 300
        while self.group.name == "bert" and kind == "cross" and not (self.run.path / "others-wait").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return super().section(kind)


@pytest.mark.slow
def test_a_group_grows_loses_a_worker_and_makes_the_labels_of_one_process(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three groups share two workers. One of these is killed after the last group took both."""
    large = make_encoder(tmp_path / "large", "bert", sentences, layers=6)
    recipe = make_mutual_recipe(
        tmp_path,
        {"bert": large, "roberta": tiny("roberta"), "other": tiny("bert")},
        sentences,
        "mutual.cycles=1",
        "groups.0.max_workers=2",
        "cross.epochs=4",
    )
    local = run_mutual(recipe, Reporter())

    run: list[Path] = []
    waiting: set[str] = set()
    texts: list[str] = []
    killed: list[str] = []
    early: list[str] = []

    def on_event(event: Event) -> None:
        if isinstance(event, LogMessage) and "run directory" in event.text:
            run.append(Path(event.text.split()[-1]))
        if not isinstance(event, GroupEvent):
            return
        inner = event.event
        if isinstance(inner, GroupActivity) and (inner.activity, inner.phase_index) == ("waiting", 2):
            waiting.add(event.group)
            if waiting == {"roberta", "other"}:
                (run[0] / "others-wait").touch()
        if isinstance(inner, GroupActivity) and (inner.activity, inner.phase_index) == ("training", 1):
            early.extend(
                actor_names(f"^trainer-{run[0].name}-{event.group}-")
            )  # the event is before the first training
        if isinstance(inner, LogMessage):
            texts.append(f"{event.group}: {inner.text}")
        grown = any(text.startswith("bert: continuing") for text in texts)
        if grown and not killed and isinstance(inner, StepReport) and event.group == "bert":
            assert kill_actor("TrainingActor", named=r"^trainer-.*-bert-.*-1$")
            killed.append("trainer 1")

    monkeypatch.setattr("distcse.runs.mutual.experiment.GroupContext", LateGroup)
    monkeypatch.setattr("distcse.runs.mutual.group.PAUSE_S", 0.0)  # these phases take less time than a restart
    pooled = run_mutual(with_values(recipe, TWO_SHARED), Reporter(on_event))
    assert killed and pooled.best and not pooled.interrupted
    assert not early, "trainers were started for the scores of the start"
    assert "bert: continuing cycle-1-cross with 2 workers" in texts
    assert any(text.startswith("bert: lost a worker in cycle-1-cross") for text in texts)
    assert_same_labels(local.directory.path, pooled.directory.path)


LONGER = (
    "mutual.cycles=1",
    "cross.epochs=30",
    "bi.epochs=20",
    "evaluation.eval_steps=60",
    *(f"groups.{number}.max_workers=1" for number in range(3)),
)
"""Phases that last longer than it takes to kill a process once a step was reported. The default of `max_workers`, which decides
the dropout, depends on the shared workers."""
SHARED = (
    "ray=true",
    "mutual.shared_workers=2",
    *(f"groups.{number}.cpus_per_worker=1" for number in range(3)),
    *(f"{kind}.log_every=1" for kind in ("bi", "cross")),
)


class Driver:
    """A running `distcse train`, and the folder of its run, which is stopped or killed while groups train."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [*TRAIN, *arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=user_environment(**(environment or {})),
            cwd=ROOT,
        )
        self.run = Path()

    def wait_for_steps(self, phase: str) -> None:
        """Wait until a group has taken a step of a phase."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if named := re.search(r"run directory (/\S+)", line):
                self.run = Path(named[1])
            if f"{phase} training" in line:
                break
        for _ in range(600):
            phases: dict[str, str] = {}
            for line in (self.run / "events.jsonl").read_text().splitlines(keepends=True):
                if not line.endswith("\n"):
                    break  # it is being written
                event: Mapping[str, str] = json.loads(line)
                if event["event"] == "GroupActivity":
                    phases[event["group"]] = event["phase"]
                if event["event"] == "StepReport" and phases.get(event["group"]) == phase:
                    return
            time.sleep(0.1)
        raise AssertionError(f"no step of {phase}")

    def end(self, stop: signal.Signals | None = None, timeout_s: float = 120) -> str:
        """Send a signal, if there is one; wait for the end, check its status, and return what was written to stderr meanwhile."""
        if stop is not None:
            self._process.send_signal(stop)
        _, errors = self._process.communicate(timeout=timeout_s)
        expected = 0 if stop is None else 130 if stop == signal.SIGTERM else -stop
        assert self._process.returncode == expected, errors
        return errors

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]
) -> tuple[Path, Path]:
    """The file of a recipe of three groups, and its run in one process."""
    folder = tmp_path_factory.mktemp("three")
    models = {"bert": tiny("bert"), "roberta": tiny("roberta"), "minilm": tiny("minilm")}
    recipe = make_mutual_recipe(folder, models, sentences, *LONGER)
    return folder / "recipe.yaml", run_mutual(recipe, Reporter()).directory.path


@pytest.mark.slow
def test_a_run_resumes_after_its_drivers_were_stopped_and_killed(undisturbed: tuple[Path, Path]) -> None:
    """SIGTERM while cross-encoders train; the next driver is killed while bi-encoders train; the last one finishes the run."""
    recipe, expected = undisturbed
    with Driver([str(recipe), *LONGER, *SHARED]) as first:
        first.wait_for_steps("cycle-1-cross")
        first.end(signal.SIGTERM)
    run = first.run
    with Driver(["--resume", str(run)]) as second:
        second.wait_for_steps("cycle-1-bi")
        second.end(signal.SIGKILL)
    with Driver(["--resume", str(run)]) as last:
        last.end(timeout_s=600)
    assert_same_labels(expected, run)


@pytest.mark.slow
def test_a_lost_node_does_not_change_the_labels(undisturbed: tuple[Path, Path], tmp_path: Path) -> None:
    """Each shared worker has a node. One is killed while a group trains there; `mutual.max_failures` does not count it."""
    recipe, expected = undisturbed
    on_nodes = [f"groups.{number}.node_labels={{role: work}}" for number in range(3)]
    with Nodes(tmp_path, cpus=1) as nodes:
        nodes.ensure(2)
        with Driver([str(recipe), *LONGER, *SHARED, *on_nodes, "mutual.max_failures=0"], nodes.environment) as driver:
            driver.wait_for_steps("cycle-1-cross")
            next(node for node in nodes.work if node.processes("TrainingActor|train")).kill()
            errors = driver.end(timeout_s=600)
    assert "lost a node in cycle-1-cross" in errors
    assert_same_labels(expected, driver.run)


@pytest.mark.slow
def test_runs_resume_after_their_drivers_were_stopped_and_killed(recipe_with: MakeRecipe, tmp_path: Path) -> None:
    """SIGTERM while cross-encoders train; the next driver is killed while bi-encoders train; the last one finishes the run."""
    uninterrupted = run_mutual(recipe_with(), Reporter())
    recipe_with(*ON_RAY)
    arguments = [str(tmp_path / "recipe.yaml"), *LONG, *ON_RAY, "cross.log_every=1", "bi.log_every=1"]
    run = _run_until(arguments, "cycle-1-cross", signal.SIGTERM)
    assert _run_until(["--resume", str(run)], "cycle-1-bi", signal.SIGKILL) == run
    directory, recipe = RunDirectory.reopen(run, ["ray=false"])
    assert isinstance(recipe, MutualRecipe)
    resumed = run_mutual(recipe, Reporter(), directory)
    assert resumed.best and not resumed.interrupted
    assert_same_labels(uninterrupted.directory.path, resumed.directory.path)


def _run_until(arguments: list[str], phase: str, stop: signal.Signals) -> Path:
    """Start `distcse train`, send it a signal once a group has taken a step of a phase, and return the run's folder."""
    with Driver(arguments) as driver:
        driver.wait_for_steps(phase)
        driver.end(stop)
        return driver.run


@pytest.mark.slow
def test_a_group_that_fails_too_often_ends_the_run_or_is_dropped(recipe_with: MakeRecipe, cluster: None) -> None:
    def kill(event: Event) -> None:
        if isinstance(event, GroupEvent) and event.group == "bert" and isinstance(event.event, StepReport):
            kill_actor("TrainingActor")

    overrides = (*SHORT, *ON_RAY, "mutual.max_failures=0")
    with fails_with(WorkersLostError, "group ", " 1 times", "cycle-1-cross", "--resume"):
        run_mutual(recipe_with(*overrides), Reporter(kill))
    dropped = run_mutual(recipe_with(*overrides, "mutual.on_failure=drop"), Reporter(_once(kill)))
    assert len(dropped.dropped) == 1 and len({best.group for best in dropped.best}) == 1


def _once(kill: Callable[[Event], None]) -> Callable[[Event], None]:
    done: list[Event] = []

    def once(event: Event) -> None:
        if not done and isinstance(event, GroupEvent) and event.group == "bert" and isinstance(event.event, StepReport):
            done.append(event)
            kill(event)

    return once
