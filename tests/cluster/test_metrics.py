"""Monitoring of a run: metrics at a node's Prometheus endpoint, names of actors and tasks, and no secrets in logs."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.events import (
    CheckpointSaved,
    DevScore,
    Event,
    GroupActivity,
    GroupEvent,
    Reporter,
    StageProgress,
    StepReport,
)
from tests.backends import run
from tests.jobs import make_recipe

pytestmark = pytest.mark.cluster

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
_SAMPLE = re.compile(r"^ray_(distcse_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_TAG = re.compile(r'(run|group|part|teacher)="([^"]*)"')


def read_metrics() -> Samples:
    """Read distcse's metrics from the endpoint of the cluster's node, by name and tags."""
    import ray

    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=10) as answer:
        text = answer.read().decode()
    return {(name, frozenset(_TAG.findall(tags))): float(value) for name, tags, value in _SAMPLE.findall(text)}


def wait_for_metrics(names: set[str], run: str) -> Samples:
    """Read a run's metrics once all these names are there; Ray exports them within seconds."""
    deadline = time.monotonic() + 30
    while True:
        found = {key: value for key, value in read_metrics().items() if ("run", run) in key[1]}
        if names <= {name for name, _ in found} or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


@pytest.mark.slow
def test_a_run_exports_metrics_and_leaks_no_secret(
    tmp_path: Path,
    tiny: Callable[..., Path],
    sentences: list[str],
    cluster: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray
    from ray.util.state import list_actors, list_tasks

    from distcse.cluster.metrics import COUNTERS, GAUGES, RunMetrics

    metrics = {*GAUGES, *(f"{name}_total" for name in COUNTERS)}
    secrets = {"HF_TOKEN": "hf_SentinelOfTheHub", "DISTCSE_ENDPOINT_KEY": "sk-SentinelOfTheEndpoint"}
    for name, secret in secrets.items():
        monkeypatch.setenv(name, secret)
    steps: list[StepReport] = []
    actors: set[str] = set()
    found: Samples = {}

    def on_event(event: Event) -> None:
        if isinstance(event, StepReport):
            steps.append(event)
        if isinstance(event, DevScore) and event.step == 0:
            actors.update(actor.name for actor in list_actors(limit=1000) if actor.state == "ALIVE")
        if isinstance(event, CheckpointSaved) and steps and event.step == steps[-1].total:
            (folder,) = (tmp_path / "runs").iterdir()
            other = RunMetrics(folder.name)  # events that this run lacks: a reused table, a group
            other.on_event(StageProgress("teacher 7", 10, 10, "sentences", finished=True, reused=30))
            other.on_event(GroupEvent("bert", GroupActivity("cycle-1-bi", "training", phase_index=2)))
            found.update(wait_for_metrics(metrics, folder.name))

    overrides = ("training.workers=1", "training.cpus_per_worker=1", "training.epochs=20", "evaluation.eval_steps=200")
    overrides += ("teachers.serve=actor",)
    recipe = make_recipe(
        tmp_path, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences, *overrides, "evaluation.final_suites=[]"
    )
    done = run(recipe, Reporter(on_event))
    assert metrics == {metric for metric, _ in found}

    def value(metric: str, group: str = "student", **tags: str) -> float:
        return found[f"distcse_{metric}", frozenset({"run": done.directory.path.name, "group": group, **tags}.items())]

    last, state = steps[-1], done.train_result.state
    assert value("step") == last.step == done.train_result.steps
    assert value("steps_per_second") == pytest.approx(1 / last.seconds)
    assert value("learning_rate") == pytest.approx(last.lr)
    assert value("teacher_wait_share") == pytest.approx(last.teacher_wait_s / last.seconds)
    for part, loss in last.losses.items():
        assert value("loss", part=part) == pytest.approx(loss)
    best = state.best
    assert best is not None
    assert value("best_dev_score") == pytest.approx(best[1])
    assert value("dev_score") == pytest.approx(state.scores[-1][1])
    for teacher in ("0", "1"):
        assert value("rows_embedded_total", teacher=teacher) == done.rows
        assert value("table_hit_rate", teacher=teacher) == 0
    assert value("table_hit_rate", teacher="7") == 0.75 and value("phase", group="bert") == 2

    name = done.directory.path.name
    kinds = [f"teacher-0-0-{name}-", f"teacher-1-0-{name}-", f"servers-{name}-", f"events-{name}-"]
    for kind in kinds:
        assert any(actor.startswith(kind) for actor in actors), actors
    assert any(actor.name.startswith(f"embedding-{recipe.name}-") for actor in list_actors(limit=10_000))
    tasks = {task.name for task in list_tasks(limit=10_000)}
    assert {"embed shard 0", "TeacherServer.similarities", "EventActor.emit"} <= tasks

    logs = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", ray.get_runtime_context().get_session_name(), "logs")
    assert logs.is_dir()
    files = [*done.directory.path.rglob("*"), *logs.rglob("*")]
    text_files = [file for file in files if file.is_file() and file.suffix != ".safetensors"]
    assert len(text_files) > 20
    for file in text_files:
        content = file.read_bytes()
        assert not any(secret.encode() in content for secret in secrets.values()), file
