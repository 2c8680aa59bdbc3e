"""Simulated machines: each is a raylet in separate namespaces, joined by a bridge.

A machine has its own network (no loopback in common), processes, host name, object store, and disks where a path says so; what
is left of the file system is shared, as by NFS. Killed, all of it ends at once, as by a power cut.
"""

from __future__ import annotations

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

from tests.conftest import ROOT

RAY = str(Path(sys.executable).with_name("ray"))
_NET = f"10.{os.getpid() % 200 + 20}.77"
_PORT, _DASHBOARD = 6379, 8265


@dataclass(frozen=True)
class Machine:
    """One machine that runs."""

    address: str
    process: subprocess.Popen[bytes]
    inside: int
    """Process id, as seen from here, of its first process: whatever else it runs ends with it."""
    environment: Mapping[str, str]

    def run(self, *command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command on it, to its end."""
        process = self.start(*command, **environment)
        told, complained = process.communicate(timeout=900)
        return subprocess.CompletedProcess(process.args, process.returncode, told, complained)

    def start(self, *command: str | Path, **environment: str) -> subprocess.Popen[str]:
        """A command on it."""
        enter = ["nsenter", f"--target={self.inside}", "--mount", "--net", "--uts", "--pid", "--"]
        return subprocess.Popen(
            [*enter, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment, **environment},
            cwd=ROOT,
        )

    def cut_power(self) -> None:
        """Kill every process on it."""
        os.kill(self.inside, signal.SIGKILL)
        self.process.wait(timeout=30)


def refused() -> str | None:
    """Why this machine cannot play several; None where it can."""
    try:
        _do("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true")
    except (OSError, subprocess.CalledProcessError) as told:
        return f"namespaces are refused here: {told}"
    return None


@contextmanager
def machines(folder: Path, nodes: Sequence[Sequence[str]], disks: Sequence[Path] = ()) -> Iterator[list[Machine]]:
    """A Ray cluster of several machines; the first is its head.

    Args:
        folder: For logs.
        nodes: Arguments of `ray start` on each, without addresses and ports.
        disks: Folders that are a separate disk on each machine.
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
    }
    with ExitStack() as stack:
        bridge = f"dcse{os.getpid() % 100000}"
        _do("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_do, "ip", "link", "del", bridge)
        _do("ip", "link", "set", bridge, "up")
        running: list[Machine] = []
        for number, told in enumerate(nodes, start=1):
            address = f"{_NET}.{number}"
            joins = (
                ["--head", f"--port={_PORT}", f"--dashboard-port={_DASHBOARD}", "--dashboard-host=127.0.0.1"]
                if number == 1
                else [f"--address={_NET}.1:{_PORT}"]
            )
            ray = [RAY, "start", "--block", f"--node-ip-address={address}", *joins, *told]
            machine = stack.enter_context(_machine(folder, bridge, number, address, ray, environment, disks))
            running.append(machine)
        yield running


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
    own = [Path("/tmp/ray"), *disks]
    for disk in own:
        disk.mkdir(parents=True, exist_ok=True)
    begin = [f"hostname machine-{number}", *(f"mount -t tmpfs tmpfs {disk}" for disk in own)]
    # The wire is put in from outside, once the namespaces are there.
    wired = f"while ! ip addr show dev eth0 2>/dev/null | grep -q {address}/; do sleep 0.05; done"
    script = " && ".join([*begin, wired, f"exec {' '.join(ray)}"])
    spaces = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with open(folder / f"machine-{number}.log", "w") as log:
        process = subprocess.Popen([*spaces, "sh", "-c", script], stdout=log, stderr=log, env=dict(environment))
    outer = f"{bridge}.{number}"
    try:
        inside = _child_of(process.pid)
        _do("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", str(inside))
        _do("ip", "link", "set", outer, "master", bridge, "up")
        within = ["nsenter", f"--target={inside}", "--net", "ip"]
        _do(*within, "link", "set", "lo", "up")
        _do(*within, "link", "set", "eth0", "up")
        _do(*within, "addr", "add", f"{address}/24", "dev", "eth0")
        _do(*within, "route", "add", "default", "dev", "eth0")
        _wait_for_ray(process, Path(log.name))
        yield Machine(address, process, inside, environment)
    finally:
        if process.poll() is None:
            process.kill()  # and with it its namespace of processes
        process.wait(timeout=30)
        subprocess.run(
            ["ip", "link", "del", outer], capture_output=True, check=False
        )  # gone with its other end, or soon


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


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
