"""`distcse submit` and what it refuses, with a stand-in for the job API; tests/faults/test_jobs.py submits to Ray itself."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml

import distcse
from distcse import cli
from tests.endpoints import Reply, open_endpoint
from tests.ports import free_port

CORPUS = {"corpus": {"path": "data/text.txt"}}


@dataclass
class Head:
    """A head that has every package already, and starts no job."""

    metadata: Reply = field(default_factory=lambda: metadata("2.60.0", "3.12.1"))
    posted: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    address: str = ""

    def answer(self, asked: dict[str, Any], headers: Message) -> Reply:
        path = self.paths[-1]
        if path.endswith("cluster_metadata"):
            return self.metadata
        if path.endswith("/version"):
            return Reply(json.dumps({"version": "4", "ray_version": "2.60.0"}))
        if path == "/api/jobs/":
            self.posted.append(asked)
            return Reply(json.dumps({"job_id": None, "submission_id": asked["submission_id"]}))
        return Reply("{}", 200 if "/packages/" in path else 404)


def metadata(ray: str, python: str) -> Reply:
    return Reply(json.dumps({"data": {"rayVersion": ray, "pythonVersion": python}}))


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    """A stand-in for a cluster's head, which clusters.yaml of the current folder calls prod; with a recipe and its text."""
    head = Head()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")  # of another cluster
    monkeypatch.delenv("DISTCSE_CLUSTERS", raising=False)
    work = tmp_path / "work"
    (work / "data").mkdir(parents=True)
    (tmp_path / "text.txt").write_text("outside\n")
    (work / "data" / "text.txt").write_text("a sentence\n")
    (work / "terms.py").write_text("class Mine: ...\n")
    write(work / "base.yaml", {"extends": "minilm-3layer", "evaluation": {"data": "/shared/data"}, **CORPUS})
    custom = {"custom": {"mine": {"class_path": "terms:Mine"}}}
    write(work / "mine.yaml", {"extends": "base.yaml", "name": "mine", "objective": custom})
    with open_endpoint(head.answer, paths=head.paths) as address, chdir(work):
        head.address = address.removesuffix("/v1")
        values = {"storage.runs": "/shared/runs", "training.workers": 4, "training.node_labels": {"pool": "gpu"}}
        write(work / "clusters.yaml", {"prod": {"address": head.address, "values": values}})
        yield head


def write(file: Path, document: object) -> None:
    file.write_text(yaml.safe_dump(document))


def test_a_job_brings_distcse_its_requirements_and_the_files_of_the_recipe(
    head: Head, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["submit", "mine.yaml", "training.workers=2", "--json"]) == 0
    output = capsys.readouterr()
    assert (
        "Ray 2.60.0, Python 3.12.1; sends mine.yaml, base.yaml, terms.py, data/text.txt, 0.0 MiB zipped" in output.err
    )
    submitted, (asked,) = json.loads(output.out), head.posted
    assert submitted["cluster"] == "prod" and submitted["job"] == asked["submission_id"]
    words = shlex.split(asked["entrypoint"])
    assert words[:4] == ["python", "-m", "distcse.train", "mine.yaml"]
    of_cluster = {"storage.runs=/shared/runs", "training.workers=4", 'training.node_labels={"pool": "gpu"}'}
    assert {*words[4:7]} == of_cluster and words[7:] == ["training.workers=2", "--run-id", submitted["job"]]
    environment = asked["runtime_env"]
    assert environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "120"
    assert len(environment["py_modules"]) == 2
    constraint, *packages = environment["pip"]["packages"]
    assert constraint.startswith("--constraint ${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}/constraints-")
    names = [package.partition("<")[0].partition(">")[0].partition("[")[0] for package in packages]
    assert {"torch", "transformers", "ray", "optuna"} <= {*names} and not {"pytest", "wandb", "distcse"} & {*names}


def test_entries_of_the_own_file_and_options_go_before_the_teams(head: Head) -> None:
    own = Path.home() / ".config" / "distcse" / "clusters.yaml"
    own.parent.mkdir(parents=True)
    environment = {"env_vars": {"A": "1"}, "pip": {"packages": ["--extra-index-url URL"], "pip_check": True}}
    write(own, {"prod": {"address": head.address, "extras": ["deepspeed"], "runtime_env": environment}})
    job = distcse.submit(
        "three-mutual", "storage.runs=/x", cluster="prod", run_id="first", dry_run=True, listen=lambda event: None
    )
    write(own, {"prod": {"address": head.address, "installs": False}})
    distcse.submit("mine.yaml", "storage.runs=/x", space="rankcse-listnet", run_id="first", listen=lambda event: None)
    checked, swept = head.posted
    assert checked["submission_id"] == job.id and checked["entrypoint"].endswith("storage.runs=/x --dry-run")
    assert checked["runtime_env"]["env_vars"]["A"] == "1"
    pip = checked["runtime_env"]["pip"]
    assert pip["pip_check"] and pip["packages"][1] == "--extra-index-url URL"
    assert any(line.startswith("deepspeed") for line in pip["packages"]) and "optuna" not in str(pip)
    assert swept["entrypoint"].endswith("--space rankcse-listnet --run-id first") and ".tune " in swept["entrypoint"]
    assert "pip" not in swept["runtime_env"]


REFUSED: dict[str, tuple[list[str], Reply | dict[str, Any] | None, str]] = {
    "cluster": (["mine.yaml", "--cluster", "prdo"], None, "no cluster 'prdo'; did you mean 'prod'"),
    "recipe": (["nothing.yaml"], None, "no recipe or file 'nothing.yaml'"),
    "text": (["mine.yaml", "corpus.path=no.txt"], None, "corpus.path: no no.txt in"),
    "outside": (["mine.yaml", "corpus.path=../text.txt"], None, "../text.txt is outside of"),
    "large": (
        ["mine.yaml", "corpus.path=large.txt"],
        None,
        "Ray takes 100 MiB zipped; put large.txt into the cluster's storage",
    ),
    "runs": (["mine.yaml", "storage.runs=runs"], None, "storage.runs is runs, in the job's folder"),
    "old": (["mine.yaml"], metadata("2.40.0", "3.11.1"), "cluster prod has Ray 2.40.0 and Python 3.11.1"),
    "python": (["mine.yaml"], metadata("2.60.0", "3.10.9"), "cluster prod has Ray 2.60.0 and Python 3.10.9"),
    "token": (["mine.yaml"], Reply("", 403), "cluster prod refuses the token; set RAY_AUTH_TOKEN"),
    "no token": (["mine.yaml"], Reply("", 401), "cluster prod needs a token; set RAY_AUTH_TOKEN"),
    "other server": (["mine.yaml"], Reply("<html>"), "is not Ray's (HTTP 200)"),
    "password": (["mine.yaml"], {"address": "http://me:hunter2@head:8265"}, "address holds a user's name or password"),
    "scheme": (["mine.yaml"], {"address": "head:8265"}, "is no address of Ray's job API"),
    "key": (["mine.yaml"], {"address": "http://head:8265", "adress": 1}, "unknown key adress"),
    "secret": (
        ["mine.yaml"],
        {"address": "http://a", "runtime_env": {"env_vars": {"HF_TOKEN": "hunter2"}}},
        "set HF_TOKEN in the",
    ),
    "folder": (
        ["mine.yaml"],
        {"address": "http://a", "runtime_env": {"working_dir": "."}},
        "each job has its own working_dir",
    ),
    "extra": (["mine.yaml", "storage.runs=/x"], {"extras": ["all"]}, "distcse has no extra 'all'"),
    "pip": (
        ["mine.yaml", "storage.runs=/x"],
        {"runtime_env": {"pip": {"package": []}}},
        "runtime_env['pip'] can only have",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_submitted_is_refused_in_one_line(
    head: Head, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, state, message = REFUSED[case]
    if isinstance(state, Reply):
        head.metadata = state
    elif state is not None:
        write(Path("clusters.yaml"), {"prod": {"address": head.address, **state}})
    Path("large.txt").touch()
    os.truncate("large.txt", 2**30)
    assert cli.main(["submit", *words]) in (1, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distcse: [DCSE-")]
    assert message in line and "hunter2" not in line and not head.posted


def test_a_cluster_that_is_off_and_a_job_that_it_does_not_have_are_said(
    head: Head, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["jobs", "--cluster", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "does not answer at http://127.0.0.1" in capsys.readouterr().err
    for words in (["logs", "none"], ["logs", "none", "--follow"], ["stop", "none"]):
        assert cli.main(words) == 2
        assert "cluster prod has no job 'none'; `distcse jobs` lists its jobs" in capsys.readouterr().err
    Path("clusters.yaml").unlink()
    assert cli.main(["jobs"]) == 2
    assert "write --cluster NAME, or --cluster http://HEAD:8265" in capsys.readouterr().err
