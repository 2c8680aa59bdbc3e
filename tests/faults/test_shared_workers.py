"""Groups of a mutual distillation that share workers on a Ray cluster (`mutual.shared_workers`)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.events import Event, GroupActivity, GroupEvent, LogMessage, Reporter, StepReport
from distcse.recipe import LoopSection, with_values
from distcse.runs.mutual.phase_store import GroupContext, Kind
from tests.backends import run_mutual
from tests.drivers import Driver
from tests.kills import Nodes, actor_names, kill_actor
from tests.models import make_encoder
from tests.pairs import assert_same_labels, make_mutual_recipe

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ON_RAY = {"ray": True, "mutual.shared_workers": 2, **{f"groups.{number}.cpus_per_worker": 1 for number in range(3)}}


class LateGroup(GroupContext):
    """Lets the group bert train its first cross-encoder only when the others wait for it."""

    def section(self, kind: Kind) -> LoopSection:
        deadline = time.monotonic() + 300
        while self.group.name == "bert" and kind == "cross" and not (self.run.path / "others-wait").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return super().section(kind)


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
            early.extend(actor_names(f"trainer-{run[0].name}-{event.group}-"))  # the event is before the first training
        if isinstance(inner, LogMessage):
            texts.append(f"{event.group}: {inner.text}")
        grown = any(text.startswith("bert: continuing") for text in texts)
        if grown and not killed and isinstance(inner, StepReport) and event.group == "bert":
            assert kill_actor("TrainingActor", named=r"^trainer-.*-bert-.*-1$")
            killed.append("trainer 1")

    monkeypatch.setattr("distcse.runs.mutual.experiment.GroupContext", LateGroup)
    monkeypatch.setattr("distcse.runs.mutual.worker_pool.PAUSE_S", 0.0)  # these phases take less time than a restart
    pooled = run_mutual(with_values(recipe, ON_RAY), Reporter(on_event))
    assert killed and pooled.best and not pooled.interrupted
    assert not early, "trainers were started for the scores of the start"
    assert "bert: continuing cycle-1-cross with 2 workers" in texts
    assert any(text.startswith("bert: lost a worker in cycle-1-cross") for text in texts)
    assert_same_labels(local.directory.path, pooled.directory.path)


LONG = (
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


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]
) -> tuple[Path, Path]:
    """The file of a recipe of three groups, and its run in one process."""
    folder = tmp_path_factory.mktemp("three")
    models = {"bert": tiny("bert"), "roberta": tiny("roberta"), "minilm": tiny("minilm")}
    recipe = make_mutual_recipe(folder, models, sentences, *LONG)
    return folder / "recipe.yaml", run_mutual(recipe, Reporter()).directory.path


def test_a_run_resumes_after_its_drivers_were_stopped_and_killed(undisturbed: tuple[Path, Path]) -> None:
    """SIGTERM while cross-encoders train; the next driver is killed while bi-encoders train; the last one finishes the run."""
    recipe, expected = undisturbed
    with Driver([str(recipe), *LONG, *SHARED]) as first:
        first.wait_for_steps("cycle-1-cross")
        first.end(signal.SIGTERM)
    run = first.run
    with Driver(["--resume", str(run)]) as second:
        second.wait_for_steps("cycle-1-bi")
        second.end(signal.SIGKILL)
    with Driver(["--resume", str(run)]) as last:
        last.end(timeout_s=600)
    assert_same_labels(expected, run)


def test_a_lost_node_does_not_change_the_labels(undisturbed: tuple[Path, Path], tmp_path: Path) -> None:
    """Each shared worker has a node. One is killed while a group trains there; `mutual.max_failures` does not count it."""
    recipe, expected = undisturbed
    on_nodes = [f"groups.{number}.node_labels={{role: work}}" for number in range(3)]
    with Nodes(tmp_path, cpus=1) as nodes:
        nodes.ensure(2)
        with Driver([str(recipe), *LONG, *SHARED, *on_nodes, "mutual.max_failures=0"], nodes.environment) as driver:
            driver.wait_for_steps("cycle-1-cross")
            next(node for node in nodes.work if node.processes("TrainingActor|train")).kill()
            errors = driver.end(timeout_s=600)
    assert "lost a node in cycle-1-cross" in errors
    assert_same_labels(expected, driver.run)
