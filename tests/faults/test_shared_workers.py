"""Groups of a mutual distillation that share workers on a Ray cluster (`mutual.shared_workers`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.events import Event, GroupActivity, GroupEvent, LogMessage, Reporter, StepReport
from distcse.experiments.mutual.phase_costs import PhaseCosts
from distcse.experiments.mutual.phase_trainer import GroupContext
from distcse.experiments.mutual.phases import Kind
from distcse.experiments.mutual.scheduling import RemainingWork
from distcse.recipe import LoopSection, with_values
from tests.backends import run_mutual
from tests.kills import actor_names, kill_actor
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

    monkeypatch.setattr("distcse.experiments.mutual.experiment.GroupContext", LateGroup)
    # By its size bert is the longest, under any load.
    monkeypatch.setattr(PhaseCosts, "measure_scores", lambda *measured: None)
    monkeypatch.setattr(RemainingWork, "pays", lambda self, count: True)  # these phases take less time than a restart
    pooled = run_mutual(with_values(recipe, ON_RAY), Reporter(on_event))
    assert killed and pooled.best and not pooled.interrupted
    assert not early, "trainers were started for the scores of the start"
    assert "bert: continuing cycle-1-cross with 2 workers" in texts
    assert any(text.startswith("bert: lost a worker in cycle-1-cross") for text in texts)
    assert_same_labels(local.directory.path, pooled.directory.path)
