"""Trackers: figures arrive, a resumed run goes on in the same tracked run, and none of them stops or slows a run."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from distcse.errors import RecipeError
from distcse.events import DevScore, Event, GroupActivity, GroupEvent, LogMessage, StepReport
from distcse.experiments.distillation.preflight import check_recipe
from distcse.recipe import Recipe
from distcse.running import resume, run
from distcse.tracking import Tracking, tracking
from distcse.tracking.tracker import Ending, Line
from tests.ports import free_port

STEPS = StepReport(step=4, total=22, losses={"loss": 3.5}, lr=1e-3, seconds=0.5, waited=0.1)
DEV = DevScore(step=6, total=22, name="agreement", score=51.0, best=52.0, best_step=0)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's files hold, by name, in the order of writing."""
    from tensorboardX.proto.event_pb2 import Event as Written

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.iterdir()):
        content, place = file.read_bytes(), 0
        while place < len(content):
            (length,) = struct.unpack("<Q", content[place : place + 8])
            event = Written.FromString(content[place + 12 : place + 12 + length])
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
            place += length + 16
    return found


def test_a_resumed_run_goes_on_in_the_same_tracked_run(
    tmp_path: Path, recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    recipe = recipe_with(f"track={{tensorboard: true, mlflow: {{uri: '{uri}', experiment: mine}}}}")
    heard: list[Event] = []
    begun = run(
        recipe, listen=heard.append, stop_requested=lambda: any(isinstance(e, DevScore) and e.step for e in heard)
    )
    assert begun.interrupted
    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("mine").experiment_id
    (tracked,) = client.search_runs([experiment])
    assert (tracked.info.run_name, tracked.info.status) == (begun.directory.name, "KILLED")
    assert tracked.data.params["objective.rank.tau2"] == "0.1"

    done = resume(begun.directory, listen=heard.append)
    (tracked,) = client.search_runs([experiment])
    assert tracked.info.status == "FINISHED"
    told = {(event.step, event.losses["loss"]) for event in heard if isinstance(event, StepReport)}
    history = client.get_metric_history(tracked.info.run_id, "train/loss")
    assert {(metric.step, metric.value) for metric in history} == told
    assert max(step for step, _ in told) == 22
    board = scalars(done.directory / "tensorboard")
    assert [step for step, _ in board["train/loss"]] == sorted(step for step, _ in told)
    assert any(name.startswith("final/agreement/") for name in board)
    assert not [event for event in heard if isinstance(event, LogMessage) and event.warning]


def test_names_that_mlflow_does_not_take(
    tmp_path: Path, recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    with tracking(recipe_with(f"loggers.mlflow={{uri: '{uri}'}}"), tmp_path, pytest.fail) as told:
        told.on_event(replace(STEPS, losses={"recall@10": 0.5}))
        told.on_event(GroupEvent("one", DEV))
    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    (tracked,) = client.search_runs([client.get_experiment_by_name("distcse").experiment_id])
    assert tracked.data.metrics["train/recall_10"] == 0.5 and tracked.data.metrics["one/dev"] == 51.0
    assert tracked.info.status == "FAILED", "nobody said how it ended"


def test_wandb_offline_writes_into_the_run(tmp_path: Path, recipe_with: Callable[..., Recipe]) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    recipe, heard = recipe_with("loggers.wandb={project: mine}"), []
    for _ in range(2):
        with tracking(recipe, tmp_path, heard.append) as told:
            told.on_event(STEPS)
            told.end(interrupted=False, evaluation=None)
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert heard == [] and len({file.name for file in files}) == 1 and len(files) == 2
    until = time.monotonic() + 60  # a process of wandb's own writes them, and may be behind
    while not all(b"train/loss" in file.read_bytes() for file in files) and time.monotonic() < until:
        time.sleep(0.2)
    assert all(b"train/loss" in file.read_bytes() for file in files)


def test_groups_have_names_and_phases_of_their_own(tmp_path: Path, recipe_with: Callable[..., Recipe]) -> None:
    with tracking(recipe_with("loggers.tensorboard=true"), tmp_path, pytest.fail) as told:
        for phase in ("cycle-1-cross", "cycle-1-bi"):
            told.on_event(GroupEvent("bert", GroupActivity(phase, "training")))
            told.on_event(GroupEvent("bert", DEV))
    board = scalars(tmp_path / "tensorboard")
    assert board["bert/cycle-1-cross/dev"] == board["bert/cycle-1-bi/dev"] == [(6, 51.0)]


def test_a_server_that_is_not_there_is_told_of_once(
    tmp_path: Path, recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    heard: list[Event] = []
    recipe = recipe_with(f"loggers.mlflow={{uri: 'http://127.0.0.1:{free_port()}'}}")
    with tracking(recipe, tmp_path, heard.append) as told:
        told.on_event(STEPS)
    told.on_event(DEV)
    (note,) = heard
    assert (
        isinstance(note, LogMessage)
        and note.warning
        and note.text.startswith("loggers.mlflow is left, the run goes on: ")
    )


class Sleeper:
    """A tracker that takes its time."""

    def figures(self, values: Mapping[str, float], step: int) -> None:
        time.sleep(5)

    def end(self, ending: Ending) -> None:
        time.sleep(5)


def test_a_slow_tracker_holds_nobody_up() -> None:
    line = Line("slow", Sleeper)
    told = Tracking([line], lambda event: None)
    began = time.monotonic()
    for _ in range(1000):
        told.on_event(STEPS)
    line.close(patience=0.1)
    assert time.monotonic() - began < 2
    assert line.failure == "it did not take everything within 0.1 s of the run's end"


def test_a_missing_package_is_told_before_the_run(
    recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RecipeError, match=r'track\.wandb needs the package wandb; pip install "distcse\[wandb\]"'):
        check_recipe(recipe_with("loggers.wandb={}"))


def test_no_secret_in_a_recipe(recipe_with: Callable[..., Recipe]) -> None:
    with pytest.raises(RecipeError, match="MLFLOW_TRACKING_USERNAME") as refused:
        recipe_with("loggers.mlflow={uri: 'https://me:s3cret@host/'}")
    assert "s3cret" not in str(refused.value)


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """A real MLflow server on loopback, which answers."""
    uri = f"http://127.0.0.1:{(port := free_port())}"
    asked = ["--host", "127.0.0.1", "--port", str(port), "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", *asked, "--workers", "1"],
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 300
        while not answers(uri):
            assert process.poll() is None and time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.5)
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(uri: str) -> bool:
    try:
        return requests.get(f"{uri}/health", timeout=5).ok
    except requests.RequestException:
        return False


@pytest.mark.slow
def test_a_real_server(tmp_path: Path, recipe_with: Callable[..., Recipe]) -> None:
    pytest.importorskip("flask", reason="the server is in the package mlflow; mlflow-skinny is the client alone")
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    heard: list[Event] = []
    with server(tmp_path) as uri:
        with tracking(recipe_with(f"loggers.mlflow={{uri: '{uri}'}}"), tmp_path, heard.append) as told:
            told.on_event(STEPS)
            told.end(interrupted=False, evaluation=None)
        client = mlflow.tracking.MlflowClient(tracking_uri=uri)
        (tracked,) = client.search_runs([client.get_experiment_by_name("distcse").experiment_id])
    assert heard == [] and tracked.data.metrics["train/loss"] == 3.5 and tracked.info.status == "FINISHED"
