"""`distcse train` as a user types it: a dry run, a run that is interrupted and resumed; Ray that starts in the background."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distcse.recipe import recipe_yaml
from tests.commands import TRAIN, run_command, user_environment
from tests.conftest import ROOT
from tests.jobs import make_recipe
from tests.weights import weights_of

pytestmark = pytest.mark.cluster


@pytest.fixture
def recipe_file(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Path:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.epochs=2")
    file = tmp_path / "small.yaml"
    file.write_text(recipe_yaml(recipe))
    return file


def assert_silent_libraries(output: str) -> None:
    """Assert that DeepSpeed's banners and warnings, and those of torch that it causes, are not in a command's output."""
    noise = re.compile(
        r"deepspeed|ds_accelerator|accelerator\.py|\[(INFO|WARNING)\]|nvcc|FutureWarning|built successfully", re.I
    )
    assert not [line for line in output.splitlines() if noise.search(line)]


def test_a_run_starts_ray_stops_at_ctrl_c_and_resumes_to_a_model(recipe_file: Path) -> None:
    deepspeed = ("training.workers=1", "training.engine=deepspeed", "training.zero_stage=3")
    process = subprocess.Popen(
        [*TRAIN, recipe_file, *deepspeed, "training.epochs=4", "training.log_every=1", "evaluation.eval_steps=44"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=user_environment(DISTCSE_WORKER_LOGS="1", CI=""),
        cwd=ROOT,
    )
    assert process.stderr is not None
    stderr = ""
    for line in process.stderr:
        stderr += line
        if "step " in line and "train" in line:
            break
    process.send_signal(signal.SIGINT)
    stdout, rest = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    for words in ("corpus", "tokens", "teacher 0", "dev ", "steps/s", "left"):
        assert words in stderr
    assert "\x1b[" not in stderr and "Traceback" not in stderr + rest
    assert re.search(r"^\(TrainController pid=\d+\) .*training worker group", stderr, re.M)  # DISTCSE_WORKER_LOGS
    assert "(RayTrainWorker pid=" in stderr
    assert_silent_libraries(stderr + rest + stdout)
    assert "stopping after the current step" in rest and "resume  python -m distcse.train --resume" in stdout
    run = Path(next(line for line in stdout.splitlines() if line.startswith("run ")).split()[1])
    step = json.loads(
        (run / "checkpoints" / (run / "checkpoints" / "latest").read_text() / "trainer_state.json").read_text()
    )["step"]
    assert step > 0 and (run / "model" / "model.safetensors").exists()

    resumed = run_command([*TRAIN, "--resume", str(run), "training.workers=0"], CI="1")
    assert resumed.returncode == 0, resumed.stderr
    assert_silent_libraries(resumed.stderr + resumed.stdout)
    for words in ("Agreement", "student", f"model   {run / 'model'}", "report  ", "SentenceTransformer("):
        assert words in resumed.stdout
    card = (run / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: sentence-transformers") and "| student |" in card
    left = {"recipe.yaml", "run.json", "events.jsonl", "evaluation.json", "report.html", "report.md", "model"}
    assert {entry.name for entry in run.iterdir()} >= left
    (score,) = json.loads((run / "evaluation.json").read_text())["scores"]
    assert score["measure"] == "agreement" and score["values"]["student"] > 0


def test_a_local_cluster_is_reached_from_this_machine_only() -> None:
    """In a separate process: Ray reads the variable that binds its ports when it is imported."""
    script = """
import psutil
from distcse.cluster.cluster import cluster
with cluster(cpus=1):
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        for place in process.net_connections(kind="inet"):
            if place.status == psutil.CONN_LISTEN:
                print(place.laddr.ip)
"""
    done = run_command([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr
    listening = done.stdout.split()
    assert len(listening) > 5 and {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


@pytest.mark.slow
def test_workers_find_the_modules_of_the_current_directory(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    """Custom loss terms, one with a parameter, and a teacher, which Ray's workers import as the driver does."""
    page = (ROOT / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
    for name, code in re.findall(r'```python title="(\w+\.py)"\n(.*?)```', page, re.S):
        (tmp_path / name).write_text(code)
    recipe = make_recipe(
        tmp_path,
        tiny("bert"),
        [tiny("minilm")],
        sentences,
        "objective.custom.correlation={class_path: 'my_terms:Correlation', weight: 1.0}",
        "objective.custom.learned={class_path: 'my_temperature:LearnedTemperature'}",
        "teachers.encoders.0.class_path=my_teachers:Trigrams",
        "teachers.encoders.0.max_length=null",
        "training.workers=1",
        "training.max_steps=6",
    )
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(recipe))
    environment = user_environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [*TRAIN, "recipe.yaml"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "correlation 0." in done.stderr and "teacher 0 384 embedded" in done.stderr
    (directory,) = (tmp_path / "runs").iterdir()
    assert float(weights_of(directory)["objective.term:learned.log_scale"]) != float(torch.tensor(-math.log(0.05)))


@pytest.mark.slow
def test_a_cluster_started_in_the_background_has_the_requested_cpus_and_leaves_signals_alone() -> None:
    script = """
import os, signal, sys, threading, time
import psutil
from distcse.cluster.cluster import start_ray, cluster
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
signal.signal(signal.SIGTERM, lambda number, frame: print("heard"))
start_ray(cpus=1)
while "ray" not in sys.modules or not getattr(sys.modules["ray"], "is_initialized", bool)():
    time.sleep(0.1)
time.sleep(1)
os.kill(os.getpid(), signal.SIGTERM)
with cluster(cpus=1):
    import ray
    print(ray.cluster_resources()["CPU"])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
start_ray(cpus=1)
with cluster(cpus=2):
    print(ray.cluster_resources()["CPU"])
    start_ray(cpus=3)
    with cluster(cpus=3):
        print(ray.cluster_resources()["CPU"])
print(len(psutil.Process().children()), [t.name for t in threading.enumerate() if t.name == "cluster"])
start_ray(cpus=1)
raise SystemExit(7)
"""
    done = run_command([sys.executable, "-c", script])
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["heard", "1.0", "heard", "2.0", "2.0", "0 []"]
    assert "SIGTERM" not in done.stderr
