"""Trackers: metrics arrive, a resumed run continues the same tracker run, and no tracker stops or slows a run."""

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

from distcse.errors import InvalidValueError, LoggerSetupError
from distcse.events import DevScore, Event, GroupActivity, GroupEvent, LogMessage, StepReport
from distcse.experiments.distillation.preflight import check_recipe
from distcse.recipe import Recipe
from distcse.running import resume, run
from distcse.tracking import Tracking, track_run
from distcse.tracking.tracker import RunStatus, TrackerThread
from tests.failures import fails_with
from tests.ports import free_port

STEPS = StepReport(step=4, total=22, losses={"loss": 3.5}, lr=1e-3, seconds=0.5, teacher_wait_s=0.1)
DEV = DevScore(step=6, total=22, name="agreement", score=51.0, best=52.0, best_step=0)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read TensorBoard's files: (step, value) by name, in the order of writing."""
    from tensorboardX.proto.event_pb2 import Event as StoredEvent

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.iterdir()):
        content, position = file.read_bytes(), 0
        while position < len(content):
            (length,) = struct.unpack("<Q", content[position : position + 8])
            event = StoredEvent.FromString(content[position + 12 : position + 12 + length])
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
            position += length + 16
    return found


def test_a_resumed_run_continues_the_same_tracker_run(
    tmp_path: Path, recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    recipe = recipe_with(f"loggers={{tensorboard: true, mlflow: {{uri: '{uri}', experiment: mine}}}}")
    events: list[Event] = []
    first = run(
        recipe, listen=events.append, stop_requested=lambda: any(isinstance(e, DevScore) and e.step for e in events)
    )
    assert first.interrupted
    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("mine").experiment_id
    (tracked,) = client.search_runs([experiment])
    assert (tracked.info.run_name, tracked.info.status) == (first.directory.name, "KILLED")
    assert tracked.data.params["objective.rank.tau2"] == "0.1"

    resumed = resume(first.directory, listen=events.append)
    (tracked,) = client.search_runs([experiment])
    assert tracked.info.status == "FINISHED"
    reported = {(event.step, event.losses["loss"]) for event in events if isinstance(event, StepReport)}
    history = client.get_metric_history(tracked.info.run_id, "train/loss")
    assert {(metric.step, metric.value) for metric in history} == reported
    assert max(step for step, _ in reported) == 22
    logged = scalars(resumed.directory / "tensorboard")
    assert [step for step, _ in logged["train/loss"]] == sorted(step for step, _ in reported)
    assert any(name.startswith("final/agreement/") for name in logged)
    assert not [event for event in events if isinstance(event, LogMessage) and event.warning]


def test_characters_that_mlflow_forbids_are_replaced(
    tmp_path: Path, recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    with track_run(recipe_with(f"loggers.mlflow={{uri: '{uri}'}}"), tmp_path, pytest.fail) as trackers:
        trackers.on_event(replace(STEPS, losses={"recall@10": 0.5}))
        trackers.on_event(GroupEvent("one", DEV))
    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    (tracked,) = client.search_runs([client.get_experiment_by_name("distcse").experiment_id])
    assert tracked.data.metrics["train/recall_10"] == 0.5 and tracked.data.metrics["one/dev"] == 51.0
    assert tracked.info.status == "FAILED", "`end` was not called"


def test_offline_wandb_writes_into_the_runs_folder(tmp_path: Path, recipe_with: Callable[..., Recipe]) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    recipe, events = recipe_with("loggers.wandb={project: mine}"), []
    for _ in range(2):
        with track_run(recipe, tmp_path, events.append) as trackers:
            trackers.on_event(STEPS)
            trackers.end(interrupted=False, evaluation=None)
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert events == [] and len({file.name for file in files}) == 1 and len(files) == 2
    until = time.monotonic() + 60  # a separate process of wandb writes them with a delay
    while not all(b"train/loss" in file.read_bytes() for file in files) and time.monotonic() < until:
        time.sleep(0.2)
    assert all(b"train/loss" in file.read_bytes() for file in files)


def test_metrics_of_groups_have_group_and_phase_as_prefix(tmp_path: Path, recipe_with: Callable[..., Recipe]) -> None:
    with track_run(recipe_with("loggers.tensorboard=true"), tmp_path, pytest.fail) as trackers:
        for phase in ("cycle-1-cross", "cycle-1-bi"):
            trackers.on_event(GroupEvent("bert", GroupActivity(phase, "training")))
            trackers.on_event(GroupEvent("bert", DEV))
    logged = scalars(tmp_path / "tensorboard")
    assert logged["bert/cycle-1-cross/dev"] == logged["bert/cycle-1-bi/dev"] == [(6, 51.0)]


def test_an_unreachable_server_is_warned_of_once(
    tmp_path: Path, recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    events: list[Event] = []
    recipe = recipe_with(f"loggers.mlflow={{uri: 'http://127.0.0.1:{free_port()}'}}")
    with track_run(recipe, tmp_path, events.append) as trackers:
        trackers.on_event(STEPS)
    trackers.on_event(DEV)
    (warning,) = events
    assert isinstance(warning, LogMessage) and warning.warning and "loggers.mlflow" in warning.text


class SlowTracker:
    """A tracker whose calls take 5 s."""

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        time.sleep(5)

    def finish(self, status: RunStatus) -> None:
        time.sleep(5)


def test_a_slow_tracker_does_not_delay_the_run() -> None:
    thread = TrackerThread("slow", SlowTracker)
    trackers = Tracking([thread], lambda event: None)
    began = time.monotonic()
    for _ in range(1000):
        trackers.on_event(STEPS)
    thread.close(timeout_s=0.1)
    assert time.monotonic() - began < 2
    assert thread.failure is not None and "0.1 s" in thread.failure


def test_a_missing_package_is_an_error_before_the_run(
    recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with fails_with(LoggerSetupError, "loggers.wandb", 'pip install "distcse[wandb]"'):
        check_recipe(recipe_with("loggers.wandb={}"))


def test_a_secret_in_a_recipe_is_refused_and_not_repeated(recipe_with: Callable[..., Recipe]) -> None:
    with fails_with(InvalidValueError, "MLFLOW_TRACKING_USERNAME") as refused:
        recipe_with("loggers.mlflow={uri: 'https://me:s3cret@host/'}")
    assert "s3cret" not in str(refused.value)


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Start a real MLflow server on the loopback interface, and wait until it responds."""
    uri = f"http://127.0.0.1:{(port := free_port())}"
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", *arguments, "--workers", "1"],
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 300
        while not is_up(uri):
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.5)
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_up(uri: str) -> bool:
    try:
        return requests.get(f"{uri}/health", timeout=5).ok
    except requests.RequestException:
        return False


@pytest.mark.slow
def test_a_real_server(tmp_path: Path, recipe_with: Callable[..., Recipe]) -> None:
    pytest.importorskip("flask", reason="the server is in the package mlflow; mlflow-skinny is the client alone")
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    events: list[Event] = []
    with server(tmp_path) as uri:
        with track_run(recipe_with(f"loggers.mlflow={{uri: '{uri}'}}"), tmp_path, events.append) as trackers:
            trackers.on_event(STEPS)
            trackers.end(interrupted=False, evaluation=None)
        client = mlflow.tracking.MlflowClient(tracking_uri=uri)
        (tracked,) = client.search_runs([client.get_experiment_by_name("distcse").experiment_id])
    assert events == [] and tracked.data.metrics["train/loss"] == 3.5 and tracked.info.status == "FINISHED"
