"""`distcse train` as a job on a cluster started by hand: authentication, stop, resume; and by `distcse submit`."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distcse.recipe import recipe_yaml
from tests.commands import TRAIN, run_command, user_environment
from tests.conftest import ROOT
from tests.jobs import make_recipe
from tests.ports import free_ports

RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture
def recipe_file(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Path:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.epochs=2")
    file = tmp_path / "small.yaml"
    file.write_text(recipe_yaml(recipe))
    return file


def job(head: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_command([RAY, "job", *map(str, arguments)], **head)


@contextmanager
def started(ray: str, log: Path) -> Iterator[dict[str, str]]:
    """Context manager: a cluster started by hand, as an operator does; its address and token as environment."""
    port, dashboard, agent = free_ports(3)
    folder = tempfile.mkdtemp(prefix="dcse")  # short, because paths of sockets are limited
    environment = {
        # In Ray's usual folder, a job is given the address of the cluster that was started last, by another test too.
        "RAY_TMPDIR": folder,
        "PATH": f"{Path(ray).parent}{os.pathsep}{os.environ['PATH']}",  # a job's `python`
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
    }
    without = {"RAY_ADDRESS", "PYTHONPATH"}
    started = {k: v for k, v in user_environment(**environment).items() if k not in without}
    ports = [f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=4", "--dashboard-host=127.0.0.1"]
    # Where another cluster of this machine has the usual one, no job could be taken.
    ports.append(f"--dashboard-agent-listen-port={agent}")
    with open(log, "w") as output:
        process = subprocess.Popen(
            [ray, "start", "--head", "--block", *ports], stdout=output, stderr=output, env=started
        )
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            if Path(folder, "ray", "ray_current_cluster").exists():  # written once all of its processes are up
                break
            time.sleep(0.5)
        yield environment
    finally:
        process.terminate()
        process.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def head(tmp_path: Path) -> Iterator[dict[str, str]]:
    with started(RAY, tmp_path / "head.log") as environment:
        yield environment


def ask(head: dict[str, str], path: str) -> Any:
    """What the cluster's job service says at a path, as `ray job status` and `ray job logs` print it."""
    headers = {"Authorization": f"Bearer {head['RAY_AUTH_TOKEN']}"}
    request = urllib.request.Request(f"{head['RAY_ADDRESS']}/api/jobs/{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


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
def test_a_job_needs_the_token_is_stopped_and_resumes_under_another_id(
    recipe_file: Path, head: dict[str, str], tmp_path: Path
) -> None:
    """Submitted from the user's working directory, with the recipe's path in it."""
    token = head["RAY_AUTH_TOKEN"]
    assert [asked_to_run_something(head, given) for given in (None, "wrong", token)] == [401, 403, 200]

    work = tmp_path / "work"
    work.mkdir()
    recipe_file.rename(work / "mine.yaml")
    environment = json.dumps({"env_vars": {"HF_HUB_OFFLINE": "1"}})
    sent = ["submit", "--working-dir", work, "--runtime-env-json", environment, "--submission-id"]
    overrides = [
        "training.workers=1",
        "training.cpus_per_worker=1",
        "training.epochs=20",
    ]
    overrides += ["training.log_every=2", "evaluation.eval_steps=200"]
    begun = job(head, *sent, "first", "--no-wait", "--", *TRAIN, "mine.yaml", *overrides)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    deadline = time.monotonic() + 600
    while not (runs := [file for file in tmp_path.glob("runs/*/events.jsonl") if '"StepReport"' in file.read_text()]):
        assert time.monotonic() < deadline, ask(head, "first/logs")["logs"]
        time.sleep(0.2)
    run = runs[0].parent
    stopped = job(head, "stop", "first")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    logs = ask(head, "first/logs")["logs"]
    assert "steps/s" in logs and f"--resume {run}" in logs
    assert "what is stored is kept; Ray kills a stopped job after 60 s (" in logs
    assert ask(head, "first")["status"] == "STOPPED"
    latest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text()
    before = json.loads((latest / "trainer_state.json").read_text())
    assert before["step"] > 0 and not before["finished"]

    resumed = job(head, *sent, "second", "--", *TRAIN, "--resume", run, "training.workers=0")
    assert resumed.returncode == 0, (resumed.stdout + resumed.stderr)[-4000:]
    assert "second" in resumed.stdout and "succeeded" in resumed.stdout + resumed.stderr
    assert "agreement" in resumed.stdout and (run / "evaluation.json").exists()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [event["step"] for event in events if event["event"] == "StepReport"]
    assert steps == sorted(set(steps)) and steps[-1] == 440
    for file in (*run.rglob("*"), tmp_path / "head.log"):
        assert not file.is_file() or token.encode() not in file.read_bytes(), file


@pytest.mark.slow
def test_a_missing_or_wrong_token_is_said_in_one_line(recipe_file: Path, head: dict[str, str], tmp_path: Path) -> None:
    """Without RAY_AUTH_MODE, and as with Ray's coming default, which requires a token."""
    address = Path(head["RAY_TMPDIR"], "ray", "ray_current_cluster").read_text().strip()
    listed = [sys.executable, "-m", "distcse", "jobs", "--cluster", head["RAY_ADDRESS"]]
    joined = [*TRAIN, str(recipe_file), "training.workers=1", "training.max_steps=2"]
    advice = "RAY_AUTH_TOKEN if the cluster asks for one"
    for variables, of_jobs, of_joining in (
        ({}, "needs a token; set RAY_AUTH_TOKEN", advice),
        ({"RAY_AUTH_TOKEN": "wrong"}, "refuses the token; set RAY_AUTH_TOKEN", advice),
        (
            {"RAY_AUTH_MODE": "token"},
            "finds no token for the cluster; set RAY_AUTH_TOKEN",
            "set RAY_AUTH_MODE and RAY_AUTH_TOKEN",
        ),
    ):
        for command, where, said in ((listed, {}, of_jobs), (joined, {"RAY_ADDRESS": address}, of_joining)):
            done = run_command(command, HOME=str(tmp_path), **variables, **where)
            (line,) = [line for line in done.stderr.splitlines() if line.startswith("distcse: [DCSE-X08] ")]
            assert done.returncode == 1 and said in line and len(line) < 400 and "Traceback" not in done.stderr
    right = {"HOME": str(tmp_path), "RAY_AUTH_TOKEN": head["RAY_AUTH_TOKEN"]}
    assert run_command(listed, **right).stdout == "no jobs\n"
    done = run_command(joined, RAY_ADDRESS=address, **right)
    assert done.returncode == 0, done.stderr


def colleague(head: dict[str, str], folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs distcse in a folder, with the token alone."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "distcse", *words]
        environment = user_environment(RAY_AUTH_TOKEN=head["RAY_AUTH_TOKEN"], PYTHONPATH=str(ROOT))
        return subprocess.run(
            command, capture_output=True, text=True, timeout=900, env=environment, cwd=folder, check=False
        )

    return run


def make_work(folder: Path, tiny: Callable[..., Path], sentences: list[str], cluster: dict[str, Any]) -> None:
    """Write a recipe, its text, its models and clusters.yaml into a folder; the recipe names them by relative paths."""
    folder.mkdir()
    for kind in ("bert", "minilm"):
        shutil.copytree(tiny(kind), folder / "models" / kind)
    recipe = make_recipe(folder, tiny("bert"), [tiny("minilm")], sentences, "storage.runs=runs")
    text = recipe_yaml(recipe).replace(f"{folder}/", "").replace(str(tiny("bert")), "models/bert")
    (folder / "mine.yaml").write_text(text.replace(str(tiny("minilm")), "models/minilm"))
    values = {"storage.runs": f"{folder.parent}/runs", "storage.cache": f"{folder.parent}/cache"}
    (folder / "clusters.yaml").write_text(json.dumps({"here": {**cluster, "values": values}}))


@pytest.mark.slow
def test_a_submitted_run_is_stopped_with_a_checkpoint_and_resumed_from_another_folder(
    head: dict[str, str], tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    cluster = {"address": head["RAY_ADDRESS"], "installs": False}
    make_work(tmp_path / "work", tiny, sentences, cluster)
    run = colleague(head, tmp_path / "work")
    begun = run("submit", "mine.yaml", "training.epochs=40", "training.log_every=2", "--json")
    assert begun.returncode == 0, begun.stderr
    assert "sends mine.yaml, corpus.txt, models/bert, models/minilm, " in begun.stderr and "installs  0" in begun.stderr
    first = json.loads(begun.stdout)["job"]
    folder = tmp_path / "runs" / first
    while '"StepReport"' not in read(folder / "events.jsonl"):
        assert ask(head, first)["status"] in ("PENDING", "RUNNING"), ask(head, f"{first}/logs")["logs"]
        time.sleep(0.2)
    stopped = run("stop", first)
    assert (stopped.returncode, stopped.stdout) == (0, f"{first} stopped\n"), stopped.stderr
    assert "Ray kills a stopped job after 120 s" in run("logs", first).stdout
    assert int((folder / "checkpoints" / "latest").read_text().rpartition("-")[2]) > 0

    (tmp_path / "work").rename(tmp_path / "elsewhere")
    run = colleague(head, tmp_path / "elsewhere")
    resumed = run("submit", "mine.yaml", "training.epochs=40", "training.log_every=2", "--run-id", first, "--follow")
    assert resumed.returncode in (0, 3), resumed.stdout + resumed.stderr
    assert f"run     {folder}" in resumed.stdout and (folder / "evaluation.json").exists()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = [event["step"] for event in events if event["event"] == "StepReport"]
    assert steps == sorted(set(steps))
    second = re.search(r"job     (\S+)", resumed.stdout)
    listed = run("jobs", "--json")
    assert second is not None and [job["id"] for job in json.loads(listed.stdout)["jobs"]] == [first, second[1]]
    for file in (*folder.rglob("*"), tmp_path / "head.log"):
        assert not file.is_file() or head["RAY_AUTH_TOKEN"].encode() not in file.read_bytes(), file


def read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@pytest.mark.slow
def test_a_job_brings_all_that_a_head_with_ray_alone_lacks(
    tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    """pip installs from the machine's package index."""
    python = tmp_path / "stock" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "stock"], check=True)
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        str(ROOT / "constraints.txt"),
        "ray[default]",
    ]
    subprocess.run(command, check=True)
    with started(str(python.with_name("ray")), tmp_path / "head.log") as head:
        make_work(tmp_path / "work", tiny, sentences, {"address": head["RAY_ADDRESS"], "extras": []})
        run = colleague(head, tmp_path / "work")
        for _ in range(2):
            done = run("submit", "mine.yaml", "training.workers=1", "training.cpus_per_worker=1", "--follow")
            assert done.returncode in (0, 3), done.stdout + done.stderr
        (environments,) = Path(head["RAY_TMPDIR"]).glob("ray/session_2*/runtime_resources/pip")
        assert len([entry for entry in environments.iterdir() if entry.is_dir()]) == 1
        cluster = {"address": head["RAY_ADDRESS"], "extras": [], "runtime_env": {"pip": ["numpy==0.0.1"]}}
        values = json.loads((tmp_path / "work" / "clusters.yaml").read_text())["here"]["values"]
        (tmp_path / "work" / "clusters.yaml").write_text(json.dumps({"here": {**cluster, "values": values}}))
        failed = run("submit", "mine.yaml", "--follow")
        assert failed.returncode == 1 and "[DCSE-X14] job small-" in failed.stderr and "numpy==0.0.1" in failed.stderr
