"""Simulated machines: each is a raylet in separate namespaces, joined by a bridge.

A machine has its own network with its own loopback, processes, host name, object store, and disks at given paths. The rest of
the file system is shared, as by NFS. All processes of a machine can be killed at once, as by a power failure.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.commands import TRAIN
from tests.conftest import ROOT

RAY = str(Path(sys.executable).with_name("ray"))
_NET = f"10.{os.getpid() % 200 + 20}.77"
_PORT, _DASHBOARD = 6379, 8265
HOST = f"{_NET}.254"
"""This host's address in the machines' network."""
_FAKE_HEAD = "f" * 51 + "00000"
"""Id of the head of a cluster with Ray's fake autoscaler."""
_LIST_ACTORS = """
import json, ray
from ray.util.state import list_actors
ray.init(log_to_driver=False)
nodes = {node["NodeID"]: (node["NodeManagerAddress"], node["Labels"].get("role")) for node in ray.nodes()}
actors = [actor for actor in list_actors(detail=True, limit=1000) if actor.node_id]
kinds = [actor.class_name.rpartition(".")[2] for actor in actors]
print(json.dumps([(k, a.state, a.job_id, a.node_id, *nodes[a.node_id]) for k, a in zip(kinds, actors)]))
"""


class ActorPlace(NamedTuple):
    """Where an actor runs, or ran."""

    kind: str
    state: str
    job: str
    node: str
    address: str
    role: str | None
    """The node's label."""


@dataclass(frozen=True)
class Machine:
    """One running machine."""

    address: str
    process: subprocess.Popen[bytes]
    inside: int
    """Process id, in the host's namespace, of its first process; all other processes of the machine end with it."""
    environment: Mapping[str, str]
    link: str
    """The host's end of its network cable."""

    @property
    def dashboard(self) -> str:
        """Address of the job service, on the head."""
        return f"http://{self.address}:{_DASHBOARD}"

    def train(self, *arguments: str | Path) -> Path:
        """Train on the cluster, and return the run's folder."""
        return run_folder(ended(self.start(*TRAIN, *arguments)))

    def actors(self) -> list[ActorPlace]:
        """Return all actors of the cluster, also dead ones."""
        listed = ended(self.start(sys.executable, "-c", _LIST_ACTORS))
        return [ActorPlace(*fields) for fields in json.loads(listed.stdout.splitlines()[-1])]

    def start(self, *command: str | Path, **environment: str) -> subprocess.Popen[str]:
        """Start a command on the machine, with the cluster's address."""
        enter = ["nsenter", f"--target={self.inside}", "--mount", "--net", "--uts", "--pid", "--"]
        return subprocess.Popen(
            [*enter, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment, "RAY_ADDRESS": f"{_NET}.1:{_PORT}", **environment},
            cwd=ROOT,
        )

    def unplug(self) -> None:
        """Cut it from the network; no connection is closed."""
        _run("ip", "link", "set", self.link, "down")

    def cut_power(self) -> None:
        """Kill every process on the machine."""
        os.kill(self.inside, signal.SIGKILL)
        self.process.wait(timeout=30)


def ended(process: subprocess.Popen[str], status: int = 0) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a command, which must have this exit status."""
    out, err = process.communicate(timeout=900)
    assert process.returncode == status, out[-4000:] + err[-4000:]
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_folder(done: subprocess.CompletedProcess[str]) -> Path:
    """Return the folder of the run that a command printed."""
    return Path(next(line for line in done.stdout.splitlines() if line.startswith("run ")).split()[1])


def wait_for_event(text: str, run: Path, process: subprocess.Popen[str]) -> None:
    """Wait until an event of a run or sweep has a text."""
    deadline = time.monotonic() + 300
    while not any(text in events.read_text() for events in run.rglob("events.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)


def skip_without_namespaces() -> None:
    """Skip the test if this host cannot simulate machines."""
    try:
        _run("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this host does not allow namespaces: {error}")


@contextmanager
def machines(
    folder: Path, nodes: Sequence[Sequence[str]], disks: Sequence[Path] = (), **variables: str
) -> Iterator[list[Machine]]:
    """Context manager: run a Ray cluster of several machines; the first one is the head.

    Args:
        folder: Folder of the logs.
        nodes: Arguments of `ray start` on each, without addresses and ports.
        disks: Folders that are a separate disk on each machine.
        variables: Environment variables of the machines.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "100",
        "RAY_health_check_period_ms": "1000",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        **variables,
    }
    with ExitStack() as stack:
        bridge = f"dcse{os.getpid() % 100000}"
        _run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "link", "set", bridge, "up")
        _run("ip", "addr", "add", f"{HOST}/24", "dev", bridge)
        running: list[Machine] = []
        for number, options in enumerate(nodes, start=1):
            address = f"{_NET}.{number}"
            joins = (
                ["--head", f"--port={_PORT}", f"--dashboard-port={_DASHBOARD}", "--dashboard-host=0.0.0.0"]
                if number == 1
                else [f"--address={_NET}.1:{_PORT}"]
            )
            ray = [RAY, "start", "--block", f"--node-ip-address={address}", *joins, *options]
            machine = stack.enter_context(_machine(folder, bridge, number, address, ray, environment, disks))
            running.append(machine)
        yield running


@contextmanager
def autoscaled_machine(folder: Path, node_type: Mapping[str, Any], most: int) -> Iterator[Machine]:
    """Context manager: run a machine without CPUs, whose autoscaler starts nodes as further processes of the machine.

    Ray's fake provider of nodes: `AutoscalingCluster` would run `ray stop`, which ends the Ray processes of other tests too.

    Args:
        folder: Folder of the logs.
        node_type: Resources and labels of a started node.
        most: Number of nodes that it can start.
    """
    module = "tests.fake_nodes.NodesWithMemory"
    provider = {"type": "external", "module": module, "gcs_address": f"{_NET}.1:{_PORT}", "head_node_id": _FAKE_HEAD}
    types = {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "worker": {**node_type, "node_config": {}, "min_workers": 0, "max_workers": most},
    }
    config = {
        "cluster_name": "fake",
        "max_workers": most,
        "provider": {**provider, "launch_multiple": True, "disable_node_updaters": True},
        "available_node_types": types,
        "head_node_type": "ray.head.default",
        "idle_timeout_minutes": 10,
        "upscaling_speed": 1.0,
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        **{f"{role}setup_commands": [] for role in ("", "head_", "worker_")},
        "initialization_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }
    file = folder / "autoscaler.json"
    file.write_text(json.dumps(config))
    head = ["--num-cpus=0", f"--autoscaling-config={file}"]
    variables = {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": _FAKE_HEAD,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _FAKE_HEAD,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with machines(folder, [head], **variables) as (machine,):
        yield machine


@contextmanager
def _machine(
    folder: Path,
    bridge: str,
    number: int,
    address: str,
    ray: Sequence[str],
    environment: Mapping[str, str],
    disks: Sequence[Path],
) -> Iterator[Machine]:
    own_disks = [Path("/tmp/ray"), *disks]
    for disk in own_disks:
        disk.mkdir(parents=True, exist_ok=True)
    setup = [f"hostname machine-{number}", *(f"mount -t tmpfs tmpfs {disk}" for disk in own_disks)]
    # The host adds the network interface once the namespaces exist.
    wait_for_network = f"while ! ip addr show dev eth0 2>/dev/null | grep -q {address}/; do sleep 0.05; done"
    script = " && ".join([*setup, wait_for_network, f"exec {' '.join(ray)}"])
    unshare = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with open(folder / f"machine-{number}.log", "w") as log:
        process = subprocess.Popen([*unshare, "sh", "-c", script], stdout=log, stderr=log, env=dict(environment))
    outer = f"{bridge}.{number}"
    try:
        inside = _child_of(process.pid)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", str(inside))
        _run("ip", "link", "set", outer, "master", bridge, "up")
        within = ["nsenter", f"--target={inside}", "--net", "ip"]
        _run(*within, "link", "set", "lo", "up")
        _run(*within, "link", "set", "eth0", "up")
        _run(*within, "addr", "add", f"{address}/24", "dev", "eth0")
        _run(*within, "route", "add", "default", "dev", "eth0")
        _wait_for_ray(process, Path(log.name))
        yield Machine(address, process, inside, environment, outer)
    finally:
        if process.poll() is None:
            process.kill()  # also kills all processes in its namespace
        process.wait(timeout=30)
        subprocess.run(
            ["ip", "link", "del", outer], capture_output=True, check=False
        )  # may be deleted already, together with its other end


def _child_of(process: int) -> int:
    deadline = time.monotonic() + 10
    children = Path(f"/proc/{process}/task/{process}/children")
    while not (found := children.read_text().split()):
        assert time.monotonic() < deadline, f"no child of {process}"
        time.sleep(0.02)
    return int(found[0])


def _wait_for_ray(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while "Ray runtime started" not in log.read_text():
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()[-2000:]
        time.sleep(0.1)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
