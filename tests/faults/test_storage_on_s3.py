"""Runs on Ray that share only a bucket: a killed driver, another machine that continues, evaluation, a sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from distcse import cli
from distcse.events import Reporter
from distcse.recipe import Recipe, recipe_yaml
from distcse.storage import open_store, resolve_path
from distcse.tuning.records import read_trials
from tests.backends import run
from tests.jobs import make_recipe
from tests.s3 import CACHE, CREDENTIALS, IN_THE_BUCKET, RUNS, Server
from tests.sweeps import make_sweep

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], bucket: Server) -> Recipe:
    on_ray = (
        "training.workers=2",
        "training.cpus_per_worker=1",
        "teachers.embedding_workers=1",
        "training.max_steps=18",
    )
    return make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, *on_ray, "evaluation.final_suites=[]")


def kill_after(key: str, bucket: Server, command: list[str], log: Path, mirror: Path) -> None:
    """Start a driver on the session's cluster, and kill it when the bucket has an object whose key ends with `key`."""
    import ray

    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    environment = {**os.environ, **address, "DISTCSE_MIRROR": str(mirror)}
    with open(log, "w") as out:
        driver = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        deadline = time.monotonic() + 240
        while not any(stored_key.endswith(key) for stored_key in bucket.stored()) and time.monotonic() < deadline:
            assert driver.poll() is None, log.read_text()
            time.sleep(0.1)
        driver.send_signal(signal.SIGKILL)
        driver.wait()


def test_a_killed_run_continues_elsewhere_and_equals_a_run_on_disk(
    recipe: Recipe,
    bucket: Server,
    labelled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(recipe_yaml(recipe))
    command = [sys.executable, "-m", "distcse.train", str(file), *IN_THE_BUCKET, "--quiet"]
    kill_after("checkpoints/step-000006/record.json", bucket, command, tmp_path / "log", tmp_path / "first")
    (name,) = {key.split("/")[1] for key in bucket.stored() if key.startswith("runs/")}
    address = f"{RUNS}/{name}"

    monkeypatch.setenv("DISTCSE_MIRROR", str(tmp_path / "second"))
    assert cli.main(["train", "--resume", address, "--quiet"]) == 0
    assert f"run     {address}" in capsys.readouterr().out
    assert not list(resolve_path(CACHE).glob("tables/*/*.npy"))  # only the teacher servers download them
    expected = run(recipe, Reporter()).directory.model

    monkeypatch.setenv("DISTCSE_MIRROR", str(tmp_path / "third"))
    assert cli.main(["evaluate", f"student={address}", "--data", str(labelled), "--suite", "sts", "--quiet"]) == 0
    assert "student" in capsys.readouterr().out
    model = open_store(f"{address}/model")
    assert model.fetch_folder()
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (model.path, expected))
    assert ours.keys() == theirs.keys() and all(bool((ours[key] == theirs[key]).all()) for key in ours)
    stored = bucket.objects()
    assert not any(secret.encode() in content for secret in CREDENTIALS.values() for content in stored.values())


def test_a_killed_sweep_continues_elsewhere(
    recipe: Recipe, bucket: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = tmp_path / "space.yaml"
    parameters, search = {"training.lr": {"values": [1e-3, 1e-5]}}, {"algorithm": "grid", "concurrent": 1}
    make_sweep(tmp_path, parameters, search=search)  # writes space.yaml
    file = tmp_path / "small.yaml"
    file.write_text(recipe_yaml(recipe))
    overrides_of_run = ["training.workers=1", "training.max_steps=6", *IN_THE_BUCKET]
    command = [sys.executable, "-m", "distcse.tune", str(file), "--space", str(space), *overrides_of_run, "--quiet"]
    kill_after("trials/trials.json", bucket, command, tmp_path / "log", tmp_path / "first")
    # Found by its trials, because a trial that starts writes a temporary object next to the runs to test the storage.
    (name,) = {key.split("/")[1] for key in bucket.stored() if key.endswith("trials/trials.json")}

    monkeypatch.setenv("DISTCSE_MIRROR", str(tmp_path / "second"))
    trials = resolve_path(f"{RUNS}/{name}") / "trials"
    ended = [trial for trial in read_trials(open_store(trials)) if trial.ended]
    assert cli.main(["tune", "--resume", f"{RUNS}/{name}", "--quiet"]) == 0
    monkeypatch.setenv("DISTCSE_MIRROR", str(tmp_path / "third"))
    found = read_trials(open_store(f"{RUNS}/{name}/trials"))
    assert [trial.status for trial in found] == ["finished"] * 2
    assert ended and all(trial in found for trial in ended), "an ended trial was repeated"
    assert {f"runs/{name}/{file}" for file in ("best.yaml", "trials.csv", "report.html")} <= set(bucket.stored())
    assert not [key for key in bucket.stored() if "/checkpoints/" in key and key.startswith(f"runs/{name}/")]
