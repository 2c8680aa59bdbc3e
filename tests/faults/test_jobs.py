"""`distcse train` as a job on a cluster started by hand: authentication, stop, resume."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distcse.recipe import recipe_yaml
from tests.commands import TRAIN, run_command, user_environment
from tests.jobs import make_recipe
from tests.ports import free_ports


@pytest.fixture
def recipe_file(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Path:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.epochs=2")
    file = tmp_path / "small.yaml"
    file.write_text(recipe_yaml(recipe))
    return file


def job(head: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    ray = str(Path(sys.executable).with_name("ray"))
    return run_command([ray, "job", *map(str, arguments)], **head)


@pytest.fixture
def head(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A cluster started by hand, as an operator does; its address and token as environment."""
    port, dashboard, agent = free_ports(3)
    folder = tempfile.mkdtemp(prefix="dcse")  # short, because paths of sockets are limited
    environment = {
        # In Ray's usual folder, a job is given the address of the cluster that was started last, by another test too.
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
    }
    started = user_environment(**{k: v for k, v in environment.items() if k != "RAY_ADDRESS"})
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
        shutil.rmtree(folder, ignore_errors=True)


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
