"""The command as users type it: alone, interrupted and resumed, with mistakes, and as a job on a cluster started by hand."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distcse.recipe import recipe_yaml
from tests.conftest import ROOT
from tests.jobs import make_recipe
from tests.ports import free_ports

TRAIN = [sys.executable, "-m", "distcse.train"]


@pytest.fixture
def recipe_file(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Path:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.epochs=2")
    file = tmp_path / "small.yaml"
    file.write_text(recipe_yaml(recipe))
    return file


def own_environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **more}


def train(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return finish([*TRAIN, *map(str, arguments)])


def job(head: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    ray = str(Path(sys.executable).with_name("ray"))
    return finish([ray, "job", *map(str, arguments)], **head)


def finish(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=own_environment(**environment), cwd=ROOT, check=False
    )


def test_mistakes_are_one_line_and_status_2(recipe_file: Path) -> None:
    for arguments, told in (
        (["quikstart"], "did you mean 'quickstart'"),
        ([str(recipe_file), "training.lr=fast"], "training.lr is 'fast'; expected a number"),
        ([], "name a recipe or a YAML file"),
    ):
        done = train(*arguments)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("distcse: ") and told in done.stderr and done.stderr.count("\n") == 1
    done = train(str(recipe_file), "corpus.path=/nowhere.txt")
    assert done.returncode == 1 and "corpus file /nowhere.txt does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_print_recipe_shows_the_resolved_recipe(recipe_file: Path) -> None:
    done = train(recipe_file, "--print-recipe", "objective.rank.tau2=0.025")
    assert done.returncode == 0 and "tau2: 0.025" in done.stdout and "warmup: 0.05" in done.stdout


@pytest.mark.slow
def test_a_dry_run_says_that_workers_get_none_of_the_gpus_that_ray_has(recipe_file: Path) -> None:
    """Ray is started with more GPUs than the machine has."""
    asked = [*TRAIN, str(recipe_file), "--dry-run", "training.workers=4", "training.cpus_per_worker=0.1"]
    done = finish(asked, RAY_OVERRIDE_RESOURCES='{"CPU": 4, "GPU": 3}')
    assert done.returncode == 0, done.stderr
    told = "the cluster has 3 GPUs, and none goes to the training workers: training.workers=4 needs 4 free GPUs; write "
    assert done.stderr.count(told) == 1 and "GPUs 3; workers 4, each with CPUs 0.1, GPUs 0" in done.stderr


@pytest.mark.slow
def test_alone_it_starts_ray_stops_at_ctrl_c_and_goes_on_to_a_model(recipe_file: Path) -> None:
    command = [*TRAIN, str(recipe_file), "training.workers=1", "training.engine=auto", "training.log_every=1"]
    process = subprocess.Popen(
        [*command, "training.epochs=8"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=own_environment(),
        cwd=ROOT,
    )
    assert process.stderr is not None
    told = ""
    for line in process.stderr:
        told += line
        if "step " in line and "train" in line:
            break
    process.send_signal(signal.SIGINT)
    stdout, rest = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    for words in ("corpus", "tokens", "teacher 0", "dev ", "steps/s", "left"):
        assert words in told
    assert "\x1b[" not in told and "Traceback" not in told + rest
    assert "stopping at the next report" in rest and "resume  python -m distcse.train --resume" in stdout
    run = Path(next(line for line in stdout.splitlines() if line.startswith("run ")).split()[1])
    step = json.loads(
        (run / "checkpoints" / (run / "checkpoints" / "latest").read_text() / "position.json").read_text()
    )["step"]
    assert step > 0 and (run / "model" / "model.safetensors").exists()

    resumed = train("--resume", run, "training.workers=0")
    assert resumed.returncode == 0, resumed.stderr
    for words in ("Agreement", "student", f"model   {run / 'model'}", "report  ", "SentenceTransformer("):
        assert words in resumed.stdout
    card = (run / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: sentence-transformers") and "| student |" in card
    left = {"recipe.yaml", "run.json", "events.jsonl", "evaluation.json", "report.html", "report.md", "model"}
    assert {entry.name for entry in run.iterdir()} >= left
    (score,) = json.loads((run / "evaluation.json").read_text())["scores"]
    assert score["measure"] == "agreement" and score["values"]["student"] > 0


@pytest.fixture
def head(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A cluster started by hand, as an operator does; its address and token as environment."""
    port, dashboard, agent = free_ports(3)
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
    }
    started = own_environment(**{k: v for k, v in environment.items() if k != "RAY_ADDRESS"})
    ray = str(Path(sys.executable).with_name("ray"))
    ports = [f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=4", "--dashboard-host=127.0.0.1"]
    # Where another cluster of this machine has the usual one, no job could be taken.
    ports.append(f"--dashboard-agent-listen-port={agent}")
    with open(tmp_path / "head.log", "w") as log:
        process = subprocess.Popen([ray, "start", "--head", "--block", *ports], stdout=log, stderr=log, env=started)
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", dashboard)) == 0:
                    break
            time.sleep(0.5)
        yield environment
    finally:
        process.terminate()
        process.wait(timeout=60)


def asked_to_run_something(head: dict[str, str], token: str | None) -> int:
    """HTTP status of a request to the job port, as anybody might send it; asked again while no node can take a job yet."""
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    body = json.dumps({"entrypoint": "true"}).encode()
    request = urllib.request.Request(f"{head['RAY_ADDRESS']}/api/jobs/", data=body, headers=headers, method="POST")
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status: int = answer.status
        except urllib.error.HTTPError as refused:
            status = refused.code
        if status < 500 or time.monotonic() > deadline:
            return status
        time.sleep(1)


@pytest.mark.slow
def test_a_job_wants_the_token_is_stopped_and_goes_on_under_another_id(
    recipe_file: Path, head: dict[str, str], tmp_path: Path
) -> None:
    """Sent from a folder of the user's own, whose recipe it names by its place there."""
    token = head["RAY_AUTH_TOKEN"]
    assert [asked_to_run_something(head, given) for given in (None, "wrong", token)] == [401, 403, 200]

    work = tmp_path / "work"
    work.mkdir()
    recipe_file.rename(work / "mine.yaml")
    environment = json.dumps({"env_vars": {"HF_HUB_OFFLINE": "1"}})
    sent = ["submit", "--working-dir", work, "--runtime-env-json", environment, "--submission-id"]
    overrides = [
        "training.workers=2",
        "training.dropout_rng_streams=2",
        "training.cpus_per_worker=1",
        "training.epochs=40",
    ]
    overrides += ["training.log_every=2", "evaluation.eval_steps=200"]
    begun = job(head, *sent, "first", "--no-wait", "--", *TRAIN, "mine.yaml", *overrides)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    deadline = time.monotonic() + 600
    while not (runs := [file for file in tmp_path.glob("runs/*/events.jsonl") if '"StepReport"' in file.read_text()]):
        assert time.monotonic() < deadline, job(head, "logs", "first").stdout
        time.sleep(0.2)
    run = runs[0].parent
    stopped = job(head, "stop", "first")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    logs = job(head, "logs", "first").stdout
    assert "steps/s" in logs and f"--resume {run}" in logs
    assert "stopping at the next report, with a checkpoint; Ray kills a stopped job after 60 s (" in logs
    assert "'first' was stopped" in job(head, "status", "first").stdout
    latest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text()
    before = json.loads((latest / "position.json").read_text())
    assert before["step"] > 0 and not before["finished"]

    resumed = job(head, *sent, "second", "--", *TRAIN, "--resume", run, "training.workers=0")
    assert resumed.returncode == 0, (resumed.stdout + resumed.stderr)[-4000:]
    assert "second" in resumed.stdout and "succeeded" in resumed.stdout + resumed.stderr
    assert "agreement" in resumed.stdout and (run / "evaluation.json").exists()
    refused = job(head, *sent, "third", "--", *TRAIN, "mine.yaml", "storage.runs=runs")
    told = "/runs, in Ray's temporary copy of the job's working directory, which Ray deletes; write storage.runs=/shared/runs"
    assert refused.returncode != 0 and told in refused.stdout + refused.stderr
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [event["step"] for event in events if event["event"] == "StepReport"]
    assert steps == sorted(set(steps)) and steps[-1] == 880
    for file in (*run.rglob("*"), tmp_path / "head.log"):
        assert not file.is_file() or token.encode() not in file.read_bytes(), file


@pytest.mark.slow
def test_a_cluster_of_its_own_is_reached_from_this_machine_only() -> None:
    script = """
import psutil
from distcse.ray_backend.cluster import cluster
with cluster(cpus=1):
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        for place in process.net_connections(kind="inet"):
            if place.status == psutil.CONN_LISTEN:
                print(place.laddr.ip)
"""
    done = finish([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr
    listening = done.stdout.split()
    assert len(listening) > 5 and {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


@pytest.mark.slow
def test_a_cluster_that_comes_up_ahead_is_the_one_that_is_wanted_and_leaves_signals_alone() -> None:
    script = """
import os, signal, sys, threading, time
import psutil
from distcse.ray_backend.cluster import start_ray, cluster
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
    done = finish([sys.executable, "-c", script])
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["heard", "1.0", "heard", "2.0", "2.0", "0 []"]
    assert "SIGTERM" not in done.stderr
