"""No command writes permanent files into Ray's temporary copy of a job's working directory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distcse
from distcse import cli
from distcse.devices.process import StopOnSignal
from distcse.errors import InvalidValueError
from distcse.evaluation import CustomDev
from distcse.preflight.warnings import warn_of_places
from distcse.recipe import Recipe, recipe_yaml
from distcse.runs.directory import write_recipe
from distcse.storage import is_in_job_copy, open_store, resolve_path, without_job_copy

SPACE = "name: mine\nparameters: {training.lr: {values: [1.0e-3, 2.0e-3]}}\nsearch: {algorithm: grid}\n"


@pytest.fixture
def job(tmp_path: Path, recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of a job, with `mine.yaml` and `space.yaml`."""
    folder = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(recipe_yaml(recipe_with()))
    (folder / "space.yaml").write_text(SPACE)
    monkeypatch.chdir(folder)
    return folder


def is_refused(name: str, *words: str | Path) -> bool:
    """Return whether a command exits with status 2."""
    return cli.main([name, *map(str, words), "--json"]) == 2


RUNS, CACHE = ["mine.yaml", "storage.runs=runs"], ["mine.yaml", "storage.cache=cache"]
SWEEP = ["--space", "space.yaml"]


@pytest.mark.parametrize(
    ("name", "words", "setting", "fix"),
    [
        ("train", RUNS, "storage.runs", "storage.runs=s3://BUCKET/runs"),
        ("train", [*RUNS, "--dry-run"], "storage.runs", "storage.runs=/shared/runs"),
        ("train", CACHE, "storage.cache", "storage.cache=s3://BUCKET/cache"),
        ("train", ["--resume", "runs/mine-1"], "--resume", "--resume /shared/runs/mine-1"),
        ("tune", [*RUNS, *SWEEP, "--dry-run"], "storage.runs", "storage.runs=/shared/runs"),
        ("tune", ["--resume", "runs/mine-1"], "--resume", "--resume /shared/runs/mine-1"),
        ("embed", CACHE, "storage.cache", "storage.cache=/shared/cache"),
        ("embed", [*CACHE, "--compare"], "storage.cache", "storage.cache=/shared/cache"),
        ("evaluate", ["model", "--out", "report"], "--out", "--out /shared/report"),
        ("export", ["me/model", "--onnx", "--out", "report"], "--out", "--out /shared/FOLDER"),
        ("export", ["model", "--onnx"], "MODEL", "--out /shared/FOLDER"),
    ],
)
def test_output_in_the_copy_is_refused(
    name: str,
    words: list[str],
    setting: str,
    fix: str,
    job: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for command in ("training", "tuning"):
        monkeypatch.setattr(f"distcse.cli.{command}.start_ray", lambda **options: None)
    (job / "model").mkdir()
    assert is_refused(name, *words)
    error = capsys.readouterr().err
    assert error.startswith(f"distcse: [{InvalidValueError.code}] {setting} ")
    assert f"{job}/" in error and fix in error and error.count("\n") == 1
    assert not [file for file in job.iterdir() if file.suffix != ".yaml" and any(file.rglob("*"))]


def test_the_default_folder_of_runs_is_refused_only_by_commands_that_write_runs(
    job: Path, tmp_path: Path, recipe_with: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    (job / "mine.yaml").write_text(recipe_yaml(recipe_with()).partition("storage:")[0])
    assert is_refused("train", "mine.yaml")
    error = capsys.readouterr().err
    assert f"[{InvalidValueError.code}] storage.runs " in error and f"{job}/runs" in error
    assert cli.main(["train", "mine.yaml", "--print-recipe"]) == 0
    assert cli.main(["embed", "mine.yaml", f"storage.cache={tmp_path}/shared", "--quiet"]) == 0
    assert cli.main(["plan", "mine.yaml", "--json"]) == 0
    capsys.readouterr()
    assert cli.main(["doctor", "mine.yaml", "--json"]) == 1
    checks: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    (runs,) = [check for check in checks if check["name"] == "storage.runs"]
    assert runs["verdict"] == "fail" and f"{job}/runs" in runs["found"]


def test_a_copy_of_the_package_that_hides_the_installed_one_is_named(job: Path, tmp_path: Path) -> None:
    installed = Path(distcse.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(installed, job / "distcse", ignore=ignored)
    shutil.copytree(installed, tmp_path / "distcse", ignore=ignored)
    code = "from distcse.storage import shadowed_package; print(*map(str, shadowed_package() or []), sep='\\n')"
    for folder, found in ((job, [job / "distcse", installed]), (tmp_path, [])):
        variables = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{installed.parent}"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(path) for path in found]


def test_a_job_that_runs_its_own_copy_is_warned(
    recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Path("/job/distcse"), Path("/installed/distcse")
    monkeypatch.setattr("distcse.preflight.warnings.shadowed_package", lambda: places)
    (warning,) = warn_of_places(recipe_with())
    assert warning.code == "DCSE-W12" and all(str(place) in warning.problem for place in places)


def test_paths_outside_the_copy_are_accepted_and_a_run_there_is_resumed(job: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (job / "link").symlink_to(shared)
    assert is_in_job_copy("runs") and is_in_job_copy(job)
    assert not is_in_job_copy("link/runs") and not is_in_job_copy(shared)
    assert not is_in_job_copy(resolve_path("s3://bucket/runs"))
    for path, name in (
        (f"{job}/models/own", "models/own"),
        ("s3://bucket/m", "s3://bucket/m"),
        (f"{shared}/m", f"{shared}/m"),
    ):
        assert without_job_copy(path) == name
    (job / "dev.tsv").write_text("score\tsentence1\tsentence2\n1\ta\tb\n0\ta\tc\n")
    assert CustomDev.read(job / "dev.tsv").name == "dev, Spearman"
    run = distcse.run("mine.yaml", f"storage.runs={shared}", "training.max_steps=1", listen=lambda event: None)
    assert run.directory.parent == shared and run.model.is_dir()
    # A copied run can be resumed: the recipe in its folder still names the folder that Ray has deleted.
    stored = distcse.read_recipe(str(run.directory / "recipe.yaml"))
    changed = distcse.with_values(stored, {"storage.runs": str(job / "runs")})
    write_recipe(open_store(run.directory), changed)
    assert distcse.resume(run.directory, listen=lambda event: None).model.is_dir()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, ("Ctrl-C",)),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, (" 3 s ", "RAY_JOB_STOP_WAIT_TIME_S")),
        (
            {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "60"},
            (" 60 s ", "RAY_JOB_STOP_WAIT_TIME_S"),
        ),
    ],
)
def test_a_stopped_job_reports_when_ray_kills_it(
    variables: dict[str, str],
    named: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_STOP_WAIT_TIME_S"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stop = StopOnSignal()
    with stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.stop_requested()
    message = capsys.readouterr().err
    assert "stopping" in message and all(text in message for text in named)
    assert ("RAY_JOB_STOP_WAIT_TIME_S" in message) == bool(variables)
