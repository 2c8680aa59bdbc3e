"""Three students of a family on two nodes' GPUs: a killed process, a lost node, a stop, and the weights of one process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import distcse
from distcse.events import Event, GroupEvent, LogMessage, StepReport
from distcse.models import Encoder
from distcse.recipe import recipe_yaml
from tests.commands import run_command
from tests.jobs import make_recipe
from tests.kills import Nodes
from tests.weights import assert_equal_weights, weights_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAMES = ["3-layers", "2-layers", "1-layer"]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A head without CPUs, on which the driver runs, and two nodes with a GPU each."""
    with Nodes(tmp_path_factory.mktemp("nodes"), cpus=0) as running:
        for _ in range(2):
            running.start(1, "--num-gpus=1")  # one thread each, as in the local run
        yield running


def drive(folder: Path) -> None:
    """The driver: a run whose largest student's process is killed, one that is stopped and resumed, one that loses a node."""
    recipe, found = str(folder / "recipe.yaml"), {}
    found["killed"] = _trained(lambda listen: distcse.run(recipe, listen=listen), "process")
    stopped = _trained(lambda listen: distcse.run(recipe, listen=listen, stop_requested=lambda: listen.has_steps))
    found["stopped"] = stopped
    found["resumed"] = _trained(lambda listen: distcse.resume(Path(stopped["run"]), listen=listen))
    found["node lost"] = _trained(lambda listen: distcse.run(recipe, listen=listen), "node")
    (folder / "found.json").write_text(json.dumps(found))


class _Listener:
    """Notes what a run reports, and kills the process of a student, or its node, once that has written checkpoints."""

    def __init__(self, kills: str) -> None:
        self.messages: list[str] = []
        self.continued: list[str] = []
        self.has_steps = False
        self._kills = kills

    def __call__(self, event: Event) -> None:
        if isinstance(event, LogMessage):
            self.messages.append(event.text)
        if not isinstance(event, GroupEvent):
            return
        if isinstance(event.event, LogMessage) and event.event.text.startswith("resuming after step"):
            self.continued.append(event.event.text)
        if isinstance(event.event, StepReport):
            self.has_steps = True
            if self._kills and event.event.step > 25:
                process = psutil.Process(_training_processes()[0])
                raylet = process.parent()
                assert raylet is not None and raylet.name() == "raylet"
                for killed in [process] if self._kills == "process" else [raylet, *raylet.children(recursive=True)]:
                    killed.kill()
                self._kills = ""


def _training_processes() -> list[int]:
    """Return the processes of this driver's cluster that train a student."""
    found, (_, _, port) = [], os.environ["RAY_ADDRESS"].rpartition(":")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            parent = process.parent()
            if parent is not None and process.cmdline()[:1] and process.cmdline()[0].startswith("ray::DeviceActor"):
                found += [process.pid] if any(f":{port}" in part for part in parent.cmdline()) else []
    return found


def _trained(start: Callable[[_Listener], Any], kills: str = "") -> dict[str, Any]:
    listener = _Listener(kills)
    done = start(listener)
    return {
        "run": str(done.directory),
        "interrupted": done.interrupted,
        "models": list(done.models),
        "continued": listener.continued,
        "messages": listener.messages,
    }


def test_students_side_by_side_learn_what_they_learn_in_turn(
    nodes: Nodes, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    overrides = (
        "objective={info_nce: null, consistency: null, rank: null, regression: {}}",
        "student.projection=none",
        "student.dropout=0.1",
        "student.layers=null",
        "training.workers=1",
        "training.max_steps=120",
        "training.epochs=100",
        "training.log_every=5",
        "evaluation.dev=agreement",
        "evaluation.eval_steps=20",
        "evaluation.final_suites=[agreement]",
    )
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences, *overrides)
    family = f"family:\n{''.join(f'  - {{layers: {layers}}}{chr(10)}' for layers in (1, 3, 2))}"
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(recipe) + family)
    script = f"from pathlib import Path; from tests.faults.test_family_side_by_side import drive; drive(Path({str(tmp_path)!r}))"
    done = run_command([sys.executable, "-c", script], **nodes.environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    local = distcse.run(str(tmp_path / "recipe.yaml"), "training.workers=0", listen=lambda event: None)
    line = "3 students train side by side, each with a GPU, 2 at the same time"
    for case in ("killed", "resumed", "node lost"):
        run = found[case]
        assert line in run["messages"] and not run["interrupted"] and run["models"] == NAMES
        for name in NAMES:
            assert_equal_weights(*(weights_of(Path(each) / "members" / name) for each in (local.directory, run["run"])))
    for case in ("killed", "node lost"):
        (continued,) = found[case]["continued"] or [case]
        assert continued in (f"resuming after step {step} of 120" for step in (20, 40, 60, 80, 100))
    stopped = found["stopped"]
    assert stopped["interrupted"] and stopped["models"] == NAMES[: len(stopped["models"])]
    assert found["resumed"]["continued"]
    assert Encoder.load(found["killed"]["run"] + "/members/1-layer/model").encode(["a cat"]).shape[0] == 1
