"""In Ray's copy of a job's working directory, which Ray deletes, no command writes what is to stay."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distcse
from distcse import doctor, embed, evaluate, export, plan, train, tune
from distcse.command import StopOnSignal
from distcse.errors import RecipeError
from distcse.recipe import Recipe, recipe_yaml
from distcse.runs.directory import write_recipe
from distcse.storage import is_in_job_copy, resolve_path
from distcse.tracking import require_mlflow_server, require_packages

SPACE = "name: mine\nknobs: {training.lr: {values: [1.0e-3, 2.0e-3]}}\nsearch: {algorithm: grid}\n"


@pytest.fixture
def job(tmp_path: Path, recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job's current directory, with `mine.yaml` and `space.yaml` in it."""
    folder = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(recipe_yaml(recipe_with()))
    (folder / "space.yaml").write_text(SPACE)
    monkeypatch.chdir(folder)
    return folder


def refused(main: Callable[[list[str]], int], *words: str | Path) -> bool:
    """Whether a command ends with status 2."""
    return main([*map(str, words), "--json"]) == 2


RUNS, CACHE = ["mine.yaml", "storage.runs=runs"], ["mine.yaml", "storage.cache=cache"]
SWEEP = ["--space", "space.yaml"]


@pytest.mark.parametrize(
    ("main", "words", "setting", "fix"),
    [
        (train.main, RUNS, "storage.runs", "write storage.runs=/shared/runs, or storage.runs=s3://BUCKET/runs"),
        (train.main, [*RUNS, "--dry-run"], "storage.runs", "write storage.runs=/shared/runs"),
        (train.main, CACHE, "storage.cache", "write storage.cache=/shared/cache, or storage.cache=s3://BUCKET/cache"),
        (train.main, [*CACHE, "--dry-run"], "storage.cache", "write storage.cache=/shared/cache"),
        (train.main, ["--resume", "runs/mine-1"], "--resume", "write --resume /shared/runs/mine-1"),
        (tune.main, [*RUNS, *SWEEP], "storage.runs", "write storage.runs=/shared/runs"),
        (tune.main, [*RUNS, *SWEEP, "--dry-run"], "storage.runs", "write storage.runs=/shared/runs"),
        (tune.main, ["--resume", "runs/mine-1"], "--resume", "write --resume /shared/runs/mine-1"),
        (embed.main, CACHE, "storage.cache", "write storage.cache=/shared/cache"),
        (embed.main, [*CACHE, "--compare"], "storage.cache", "write storage.cache=/shared/cache"),
        (embed.main, [*CACHE, "--dry-run"], "storage.cache", "write storage.cache=/shared/cache"),
        (plan.main, [*CACHE, "--calibrate"], "storage.cache", "write storage.cache=/shared/cache"),
        (evaluate.main, ["model", "--out", "report"], "--out", "write --out /shared/report"),
        (evaluate.main, ["model", "--mteb", "report"], "--mteb", "write --mteb /shared/report"),
        (export.main, ["me/model", "--onnx", "--out", "report"], "--out", "write --out /shared/FOLDER"),
    ],
)
def test_output_in_the_copy_is_refused(
    main: Callable[[list[str]], int],
    words: list[str],
    setting: str,
    fix: str,
    job: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distcse.tune.start_ray", lambda **options: None)
    assert refused(main, *words)
    told = capsys.readouterr().err
    assert told.startswith(f"distcse: [DCSE-R11] {setting} is {job}/") and "which Ray deletes; " in told and fix in told
    assert told.count("\n") == 1
    assert not [file for file in job.iterdir() if file.suffix != ".yaml" and any(file.rglob("*"))]


def test_the_default_folder_of_runs_is_refused_and_only_where_runs_are_written(
    job: Path, tmp_path: Path, recipe_with: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    (job / "mine.yaml").write_text(recipe_yaml(recipe_with()).partition("storage:")[0])
    assert refused(train.main, "mine.yaml")
    assert f"storage.runs is {job}/runs, " in capsys.readouterr().err
    assert train.main(["mine.yaml", "--print-recipe"]) == 0
    assert embed.main(["mine.yaml", f"storage.cache={tmp_path}/shared", "--quiet"]) == 0
    assert plan.main(["mine.yaml", "--json"]) == 0
    capsys.readouterr()
    assert doctor.main(["mine.yaml", "--json"]) == 1
    checks: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    (runs,) = [check for check in checks if check["name"] == "storage.runs"]
    assert runs["verdict"] == "fail" and "Ray's temporary copy" in runs["found"]


def test_a_model_in_the_copy_gets_its_onnx_file_elsewhere(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "model").mkdir()
    assert refused(export.main, "model", "--onnx")
    assert f"MODEL is {job}/model, in Ray's temporary copy" in capsys.readouterr().err


def test_what_lies_elsewhere_is_taken(job: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (job / "link").symlink_to(shared)
    assert is_in_job_copy("runs") and is_in_job_copy(job)
    assert not is_in_job_copy("link/runs") and not is_in_job_copy(shared)
    assert not is_in_job_copy(resolve_path("s3://bucket/runs"))
    run = distcse.run("mine.yaml", f"storage.runs={shared}", "training.max_steps=1", listen=lambda event: None)
    assert run.directory.parent == shared and run.model.is_dir()


def test_a_run_is_resumed_where_it_was_copied_to(job: Path, tmp_path: Path) -> None:
    """The recipe in the run's folder still names the folder that Ray deleted."""
    stored = distcse.run("mine.yaml", "training.max_steps=1", listen=lambda event: None)
    recipe = stored.directory / "recipe.yaml"
    write_recipe(recipe, distcse.with_values(distcse.read_recipe(str(recipe)), {"storage.runs": str(job / "runs")}))
    assert distcse.resume(stored.directory, listen=lambda event: None).model.is_dir()


def test_mlflow_without_an_address_is_refused(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track = distcse.read_recipe("mine.yaml", ["loggers.mlflow={}"]).loggers
    with pytest.raises(RecipeError, match=r"which Ray deletes; write loggers.mlflow.uri=http://HOST"):
        require_packages(track)
    require_packages(distcse.read_recipe("mine.yaml", ["loggers.mlflow.uri=http://mlflow:5000"]).loggers)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    require_mlflow_server("")
    require_packages(track)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "press Ctrl-C again to stop at once"),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, "Ray kills a stopped job after 3 s (RAY_JOB_STOP_WAIT_TIME_S)"),
        (
            {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "60"},
            "Ray kills a stopped job after 60 s (RAY_JOB_STOP_WAIT_TIME_S): without a new checkpoint by then, the last one stays",
        ),
    ],
)
def test_a_stopped_job_says_when_ray_kills_it(
    variables: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_STOP_WAIT_TIME_S"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stop = StopOnSignal()
    with stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.stop_requested()
    assert f"with a checkpoint; {told}" in capsys.readouterr().err
