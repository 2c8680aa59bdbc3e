"""Trackers: metrics arrive, a resumed run continues the same tracker run, and no tracker stops or slows a run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distcse.api import resume, run
from distcse.checks import require
from distcse.errors import LoggerSetupError
from distcse.events import DevScore, Event, GroupActivity, GroupEvent, LogMessage, Reporter, StepReport, TrialUpdate
from distcse.recipe import Recipe, Sweep
from distcse.runs.distillation.preflight import recipe_questions
from distcse.storage import open_store
from distcse.tracking import Tracking, require_trial_loggers, track_run
from distcse.tracking.loggers import RunStatus
from distcse.tracking.tracking import TrackerThread
from distcse.tuning.records import Trial, TrialMetric
from distcse.tuning.trial import TrialContext, track_trials
from tests.failures import fails_with
from tests.ports import free_port
from tests.tensorboard import scalars

STEPS = StepReport(step=4, total=22, losses={"loss": 3.5}, lr=1e-3, seconds=0.5, teacher_wait_s=0.1)
DEV = DevScore(step=6, total=22, name="agreement", score=51.0, best=52.0, best_step=0)
LR = "training.lr"
METRICS = [TrialMetric(5, 25.0, 60.0, 1.0), TrialMetric(10, 50.0, 58.0, 2.0), TrialMetric(20, 100.0, 63.0, 4.0)]

MakeRecipe = Callable[..., Recipe]


class MlflowFolder:
    """A folder of MLflow, and a client that reads it."""

    def __init__(self, folder: Path) -> None:
        mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
        self.uri = folder.as_uri()
        self.client = mlflow.tracking.MlflowClient(tracking_uri=self.uri)

    def runs(self, experiment: str) -> list[Any]:
        return list(self.client.search_runs([self.client.get_experiment_by_name(experiment).experiment_id]))

    def history(self, run: Any, name: str) -> list[tuple[int, float]]:
        return sorted((metric.step, metric.value) for metric in self.client.get_metric_history(run.info.run_id, name))


@pytest.fixture
def mlruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowFolder:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return MlflowFolder(tmp_path / "mlruns")


def test_a_resumed_run_continues_the_same_tracker_run(mlruns: MlflowFolder, recipe_with: MakeRecipe) -> None:
    recipe = recipe_with(f"loggers={{tensorboard: true, mlflow: {{uri: '{mlruns.uri}', experiment: mine}}}}")
    events: list[Event] = []
    first = run(
        recipe, listen=events.append, stop_requested=lambda: any(isinstance(e, DevScore) and e.step for e in events)
    )
    assert first.interrupted
    (tracked,) = mlruns.runs("mine")
    assert (tracked.info.run_name, tracked.info.status) == (first.directory.name, "KILLED")
    assert tracked.data.params["objective.rank.tau2"] == "0.1"

    resumed = resume(first.directory, listen=events.append)
    (tracked,) = mlruns.runs("mine")
    assert tracked.info.status == "FINISHED"
    reported = {(event.step, event.losses["loss"]) for event in events if isinstance(event, StepReport)}
    assert {*mlruns.history(tracked, "train/loss")} == reported and max(step for step, _ in reported) == 22
    logged = scalars(resumed.directory / "tensorboard")
    assert [step for step, _ in logged["train/loss"]] == sorted(step for step, _ in reported)
    assert any(name.startswith("final/agreement/") for name in logged)
    warnings = [event.text for event in events if isinstance(event, LogMessage) and event.warning]
    expected = ("[DCSE-W02]", "[DCSE-W05]", "[DCSE-W07]")  # random teachers, few steps
    assert not [text for text in warnings if not text.startswith(expected)]


def test_metrics_of_groups_have_group_and_phase_as_prefix_and_names_that_mlflow_allows(
    mlruns: MlflowFolder, tmp_path: Path, recipe_with: MakeRecipe
) -> None:
    loggers = recipe_with(f"loggers={{tensorboard: true, mlflow: {{uri: '{mlruns.uri}'}}}}")
    with track_run(loggers, open_store(tmp_path), pytest.fail) as trackers:
        trackers.on_event(replace(STEPS, losses={"recall@10": 0.5}))
        for phase in ("cycle-1-cross", "cycle-1-bi"):
            trackers.on_event(GroupEvent("bert", GroupActivity(phase, "training")))
            trackers.on_event(GroupEvent("bert", DEV))
    logged = scalars(tmp_path / "tensorboard")
    assert logged["bert/cycle-1-cross/dev"] == logged["bert/cycle-1-bi/dev"] == [(6, 51.0)]
    (tracked,) = mlruns.runs("distcse")
    assert tracked.data.metrics["train/recall_10"] == 0.5 and tracked.data.metrics["bert/cycle-1-bi/dev"] == 51.0
    assert tracked.info.status == "FAILED", "`end` was not called"


def test_offline_wandb_writes_into_the_runs_folder(tmp_path: Path, recipe_with: MakeRecipe) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    recipe, events = recipe_with("loggers.wandb={project: mine}"), []
    for _ in range(2):
        with track_run(recipe, open_store(tmp_path), events.append) as trackers:
            trackers.on_event(STEPS)
            trackers.end(interrupted=False, evaluation=None)
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert events == [] and len({file.name for file in files}) == 1 and len(files) == 2
    until = time.monotonic() + 60
    while not all(b"train/loss" in file.read_bytes() for file in files):  # a process of wandb writes with a delay
        assert time.monotonic() < until, "the loss is missing"
        time.sleep(0.1)


def test_an_unreachable_server_is_warned_of_once(
    tmp_path: Path, recipe_with: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    events: list[Event] = []
    recipe = recipe_with(f"loggers.mlflow={{uri: 'http://127.0.0.1:{free_port()}'}}")
    with track_run(recipe, open_store(tmp_path), events.append) as trackers:
        trackers.on_event(STEPS)
    trackers.on_event(DEV)
    (warning,) = events
    assert isinstance(warning, LogMessage) and warning.warning and "loggers.mlflow" in warning.text


def test_a_slow_tracker_does_not_delay_the_run() -> None:
    released = threading.Event()

    class Blocked:
        def log_metrics(self, values: Mapping[str, float], step: int) -> None:
            released.wait()

        def finish(self, status: RunStatus) -> None:
            released.wait()

    thread = TrackerThread("slow", Blocked)
    trackers = Tracking([thread], lambda event: None)
    for _ in range(1000):
        trackers.on_event(STEPS)
    thread.close(timeout_s=0.1)
    released.set()
    assert thread.failure is not None and "0.1 s" in thread.failure


def test_a_missing_package_or_key_is_an_error_before_the_run(
    recipe_with: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("wandb.login", lambda **settings: False)
    with fails_with(LoggerSetupError, "loggers: wandb", "WANDB_API_KEY"):
        require_trial_loggers(["tensorboard", "wandb"])
    for package in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    with fails_with(LoggerSetupError, "loggers: mlflow", 'pip install "mlflow-skinny>='):
        require_trial_loggers(["mlflow"])
    with fails_with(LoggerSetupError, "loggers.wandb", 'pip install "wandb>='):
        require(recipe_questions(recipe_with("loggers.wandb={}")))


@contextmanager
def tracked_trials(
    trials: Path, recipe: Recipe, events: list[Event], *loggers: str
) -> Iterator[Callable[[Trial], None]]:
    """Yields a function that writes a trial's record and reports it, as a sweep does at each dev score and at the trial's end."""
    sweep = Sweep.model_validate({"name": "small", "parameters": {LR: {"values": [1e-3]}}, "loggers": [*loggers]})
    require_trial_loggers(sweep.loggers)
    with track_trials(sweep, TrialContext(recipe, open_store(trials)), Reporter(events.append)) as reporter:

        def record(trial: Trial) -> None:
            (trials / trial.name).mkdir(parents=True, exist_ok=True)
            trial.write(open_store(trials / trial.name))
            reporter.emit(TrialUpdate(trial.name, trial.status, 0.0, None, None, trial.values, trial.reason))

        yield record
    assert {type(event) for event in events} == {TrialUpdate}, "a tracker failed"


def test_each_trial_of_a_sweep_has_its_own_tracker_run(
    mlruns: MlflowFolder, tmp_path: Path, recipe_with: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlruns.uri)
    place, recipe, events = tmp_path / "lr-search" / "trials", recipe_with(), []
    one, two = Trial("one", {LR: 1e-3}, metrics=METRICS[:1]), Trial("two", {LR: 1e-5}, metrics=METRICS[:2])
    with tracked_trials(place, recipe, events, "tensorboard", "mlflow") as record:
        record(one)
        record(two)
        record(replace(one, metrics=METRICS, status="finished"))
    with tracked_trials(place, recipe, events, "tensorboard", "mlflow") as record:  # a resumed sweep
        record(replace(two, metrics=METRICS, status="failed"))
        record(Trial("three", {LR: 1e-2}, status="diverged"))
    assert len(events) == 5

    runs = mlruns.runs("small")
    assert {(each.info.run_name, each.data.params[LR], each.info.status, each.data.tags["sweep"]) for each in runs} == {
        ("one", "0.001", "FINISHED", "lr-search"),
        ("two", "1e-05", "FAILED", "lr-search"),
        ("three", "0.01", "FAILED", "lr-search"),
    }
    expected = {"dev": [(5, 60.0), (10, 58.0), (20, 63.0)], "best_dev": [(5, 60.0), (10, 60.0), (20, 63.0)]}
    for tracked in (each for each in runs if each.info.run_name != "three"):
        folder = place / tracked.info.run_name / "tensorboard"
        logged = scalars(folder)
        for name, values in expected.items():
            assert mlruns.history(tracked, name) == logged[name] == values
        content = b"".join(file.read_bytes() for file in folder.iterdir())
        assert b"_hparams_" in content and b"training.lr" in content
