"""`distcse train` as a job on clusters started by hand: authentication, stop, resume; and by `distcse submit`.

Three simulated machines have separate disks, and their jobs only a bucket in common. Their user's machine is this one.
"""

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
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from safetensors.torch import load_file

from distcse.events import Reporter
from distcse.recipe import load_recipe, recipe_yaml
from distcse.recipe.loading import read_as_written
from tests import s3
from tests.backends import run as run_here
from tests.commands import TRAIN, run_command, user_environment
from tests.conftest import ROOT
from tests.jobs import make_recipe
from tests.machines import HOST, Machine, ended, machines, skip_without_namespaces
from tests.pairs import make_mutual_recipe
from tests.ports import free_ports
from tests.weights import assert_equal_weights

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


@dataclass(frozen=True)
class Colleague:
    """Somebody who has the token of a cluster, and runs distcse in a folder."""

    token: str
    folder: Path

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words)
        return subprocess.CompletedProcess(process.args, *_ended(process))

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "distcse", *words]
        environment = user_environment(RAY_AUTH_TOKEN=self.token, PYTHONPATH=str(ROOT))
        return subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, env=environment, cwd=self.folder)


def _ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=1800)
    return process.returncode, out, err


def make_work(folder: Path, tiny: Callable[..., Path], sentences: list[str], cluster: dict[str, Any]) -> None:
    """Write a recipe, its text, its models and clusters.yaml into a folder; the recipe names them by relative paths."""
    folder.mkdir()
    for kind in ("bert", "minilm"):
        shutil.copytree(tiny(kind), folder / "models" / kind)
    recipe = make_recipe(folder, tiny("bert"), [tiny("minilm")], sentences, "storage.runs=runs")
    text = recipe_yaml(recipe).replace(f"{folder}/", "").replace(str(tiny("bert")), "models/bert")
    (folder / "mine.yaml").write_text(text.replace(str(tiny("minilm")), "models/minilm"))
    values = {"storage.runs": f"{folder.parent}/runs", "storage.cache": f"{folder.parent}/cache"}
    (folder / "clusters.yaml").write_text(json.dumps({"here": {"values": values, **cluster}}))


@pytest.mark.slow
def test_a_submitted_run_is_stopped_with_a_checkpoint_and_resumed_from_another_folder(
    head: dict[str, str], tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    cluster = {"address": head["RAY_ADDRESS"], "installs": False}
    make_work(tmp_path / "work", tiny, sentences, cluster)
    run = Colleague(head["RAY_AUTH_TOKEN"], tmp_path / "work")
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
    run = Colleague(head["RAY_AUTH_TOKEN"], tmp_path / "elsewhere")
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
        run = Colleague(head["RAY_AUTH_TOKEN"], tmp_path / "work")
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


@dataclass(frozen=True)
class Site:
    """Three machines behind a job service, of which the first is the head, and a bucket."""

    nodes: list[Machine]
    bucket: s3.Server
    token: str
    disk: Path
    """Each machine's own; that of jobs' copies of the bucket."""


@contextmanager
def site(folder: Path, bucket: s3.Server) -> Iterator[Site]:
    """Context manager: start three machines, which see nothing of `folder`; the head takes no work with a model."""
    token, disk = secrets.token_hex(32), folder / "disk"
    path = f"{Path(RAY).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**s3.environment(bucket.port, disk, HOST), "PATH": path, "RAY_AUTH_TOKEN": token}
    disk.mkdir(exist_ok=True)
    with machines(
        folder.parent, [["--num-cpus=0"], ["--num-cpus=2"], ["--num-cpus=2"]], [folder], **variables
    ) as nodes:
        for node in nodes:
            ended(node.start("mkdir", disk))
            ended(node.start("mount", "-t", "tmpfs", "tmpfs", disk))
        yield Site(nodes, bucket, token, disk)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.Server]:
    """A bucket that machines can use."""
    skip_without_namespaces()
    with s3.serving(tmp_path_factory.mktemp("s3") / "log", host="0.0.0.0") as server:
        yield server


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this machine alone: of paths below it, the others have none."""
    return tmp_path_factory.mktemp("site") / "own"


def make_site_work(site: Site, folder: Path, tiny: Callable[..., Path], sentences: list[str], name: str) -> Colleague:
    """Write a recipe of two workers into a folder that only this machine has, with the machines' address."""
    values = {f"storage.{key}": f"s3://{s3.BUCKET}/{name}/{key}" for key in ("runs", "cache")}
    cluster = {"address": site.nodes[0].dashboard, "installs": False, "values": values}
    make_work(folder, tiny, sentences, cluster)
    words = ["training.workers=2", "training.cpus_per_worker=1", "training.dropout_rng_streams=2"]
    words += ["teachers.embedding_workers=1", "evaluation.final_suites=[]"]
    file = folder / "mine.yaml"
    file.write_text(recipe_yaml(read_as_written(file, words)[0]))
    return Colleague(site.token, folder)


@pytest.mark.slow
def test_a_run_survives_the_loss_of_its_client_and_of_the_head(
    store: s3.Server,
    tiny: Callable[..., Path],
    sentences: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client is killed while it uploads and while it follows; the same command then begins the run, and resumes it.

    Before the tests with `three`: the machines' network is there once.
    """
    folder = tmp_path / "own"
    folder.mkdir()
    words = "submit", "mine.yaml", "storage.run_id=nightly", "training.epochs=20"
    with site(folder, store) as first:
        run = make_site_work(first, folder / "work", tiny, sentences, "head")
        client = run.start(*words)
        assert client.stderr is not None and "sends mine.yaml" in client.stderr.readline()
        client.kill()
        client.wait()
        assert run("jobs").stdout == "no jobs\n"
        client = run.start(*words, "--follow")
        deadline = time.monotonic() + 300
        while not any(key.startswith("head/runs/nightly/checkpoints/step-0000") for key in store.stored()):
            assert client.poll() is None and time.monotonic() < deadline
            time.sleep(0.5)
        client.kill()
        client.wait()
        (job,) = json.loads(run("jobs", "--json").stdout)["jobs"]
        assert job["status"] == "running"
        client = run.start("logs", job["id"], "--follow")
        assert client.stdout is not None and client.stdout.readline()
        first.nodes[0].unplug()
        status, _, said = _ended(client)
        assert status == 1 and said.startswith("distcse: [DCSE-X08] cluster here does not answer"), said
        assert len(said.splitlines()) == 1
    with site(folder, store) as second:
        run = Colleague(second.token, run.folder)
        done = run(*words, "--follow")
        assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in store.read("head/runs/nightly/events.jsonl").decode().splitlines()]
    steps = [event["step"] for event in events if event["event"] == "StepReport"]
    assert steps[-1] == 440, steps
    monkeypatch.chdir(run.folder)
    here = run_here(
        load_recipe("mine.yaml", ["training.epochs=20", "storage.runs=runs", "storage.cache=cache"]), Reporter()
    )
    (tmp_path / "theirs.safetensors").write_bytes(store.read(stored_weights(store, "head/runs/nightly/model/")))
    ours = load_file(here.directory.model / "model.safetensors")
    assert_equal_weights(ours, load_file(tmp_path / "theirs.safetensors"))


def stored_weights(bucket: s3.Server, folder: str) -> str:
    """Return the key of the only model in a folder."""
    (key,) = [key for key in bucket.stored() if key.startswith(folder) and key.endswith("/model.safetensors")]
    return key


@pytest.fixture(scope="module")
def three(own_folder: Path, store: s3.Server) -> Iterator[Site]:
    own_folder.mkdir()
    with site(own_folder, store) as running:
        yield running


@pytest.mark.slow
def test_a_sweep_and_six_groups_are_submitted_to_machines_that_share_a_bucket(
    three: Site, own_folder: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    run = make_site_work(three, own_folder / "sweep", tiny, sentences, "sweep")
    space = {"name": "rates", "parameters": {"training.lr": {"values": [1e-3, 1e-4]}}, "search": {"algorithm": "grid"}}
    space |= {"schedule": {"kind": "none"}, "final_runs": {"seeds": []}, "loggers": []}
    (run.folder / "rates.yaml").write_text(json.dumps(space))
    words = ["training.workers=1", "training.max_steps=6", "storage.run_id=rates"]
    done = run("submit", "mine.yaml", *words, "--space", "rates.yaml", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trials  s3://bucket/sweep/runs/rates/trials.csv" in done.stdout
    assert {f"sweep/runs/rates/{file}" for file in ("best.yaml", "trials.csv")} <= {*three.bucket.stored()}

    names = [f"{kind}-{number}" for kind in ("bert", "minilm") for number in range(3)]
    models = {name: Path(f"models/{name.partition('-')[0]}") for name in names}
    work = own_folder / "mutual"
    make_mutual_recipe(work, models, sentences)
    for kind in ("bert", "minilm"):
        shutil.copytree(tiny(kind), work / "models" / kind)
    recipe = (work / "recipe.yaml").read_text().replace(f"{work}/", "")
    (work / "recipe.yaml").write_text(recipe)
    shutil.copy(run.folder / "clusters.yaml", work)
    run = Colleague(three.token, work)
    words = ["ray=true", "mutual.cycles=1", "mutual.shared_workers=2", "storage.run_id=six"]
    done = run("submit", "recipe.yaml", *words, "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "_ray_pkg_" not in done.stdout
    assert all(stored_weights(three.bucket, f"sweep/runs/six/models/{name}/bi/") for name in names)


@pytest.mark.slow
def test_a_full_disk_of_a_node_ends_a_job_in_one_line_and_the_same_command_continues(
    three: Site, own_folder: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    run = make_site_work(three, own_folder / "full", tiny, sentences, "full")
    for node in three.nodes[1:]:
        ended(node.start("mount", "-o", "remount,size=100k", three.disk))
    command = "submit", "mine.yaml", "storage.run_id=full", "--follow"
    failed = run(*command)
    for node in three.nodes[1:]:
        ended(node.start("mount", "-o", "remount,size=1g", three.disk))
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert failed.returncode == 1, failed.stdout
    (line,) = [line for line in failed.stdout.splitlines() if line.startswith("distcse: [")]
    assert "No space left" in line and "Traceback" not in failed.stdout, failed.stdout
