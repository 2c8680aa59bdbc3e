"""Kill processes with SIGKILL, as a machine that dies does, and start Ray nodes to kill."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.ports import free_ports

_AGENTS = ("dashboard-agent-grpc", "dashboard-agent-listen", "runtime-env-agent", "metrics-export")


class CpuHolder:
    """An actor that only occupies CPUs."""

    def is_ready(self) -> bool:
        return True


def kill_actor(kind: str, how: signal.Signals = signal.SIGKILL, named: str = "") -> bool:
    """Send a signal to the process of one live actor. Actors whose process has ended, which Ray still lists, are skipped.

    Args:
        kind: The actor's class, without the function that defines it.
        how: The signal. Default: SIGKILL.
        named: Regular expression to find in the actor's name. Default: any name.

    Returns:
        Whether there was such an actor.
    """
    from ray.util.state import list_actors

    for actor in list_actors(limit=1000):
        is_match = actor.class_name.rpartition(".")[2] == kind and re.search(named, actor.name or "")
        if is_match and actor.state == "ALIVE" and actor.pid:
            try:
                os.kill(actor.pid, how)
            except ProcessLookupError:
                continue
            return True
    return False


def actor_names(named: str) -> list[str]:
    """Return the names that match, of all actors that Ray lists: also of those that have ended."""
    from ray.util.state import list_actors

    return [actor.name for actor in list_actors(limit=1000) if re.search(named, actor.name or "")]


def processes_of(parent: psutil.Process, kind: str) -> list[psutil.Process]:
    """Return the live descendants of a process that are raylets, or actors of a class, oldest first.

    While an actor runs a task, its process title is the task's name, such as `ray::embed shard 3`.
    """
    words = ("EmbeddingActor", "embed shard") if kind == "EmbeddingActor" else (kind,)
    found = []
    for process in parent.children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            is_match = process.name() == kind or (
                title.startswith("ray::") and re.search(rf"\b({'|'.join(words)})\b", title)
            )
            if is_match and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.create_time(), process))
        except psutil.NoSuchProcess:
            continue
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


class Node:
    """One node of a cluster, started with `ray start --block`.

    Args:
        process: The command's process.
        log: The command's output.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    @property
    def is_up(self) -> bool:
        """Whether its raylet is alive."""
        return self._process.poll() is None and bool(self.processes("raylet"))

    def wait_for_ray(self) -> None:
        """Wait until Ray runs on the node."""
        for _ in range(1800):
            if "Ray runtime started" in self._log.read_text():
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.1)
        raise TimeoutError(f"a node did not start: {self._log.read_text()[-2000:]}")

    def processes(self, kind: str) -> list[psutil.Process]:
        """Return its live processes of a kind, oldest first; see `processes_of`."""
        return processes_of(psutil.Process(self._process.pid), kind)

    def kill(self) -> None:
        """Kill its raylet, as a power failure would; processes that the raylet started end by themselves."""
        for raylet in self.processes("raylet"):
            raylet.kill()

    def end(self) -> None:
        """Stop the node and all its processes."""
        children = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        self._process.terminate()
        self._process.wait(timeout=60)
        for process in psutil.wait_procs(children, timeout=10)[1]:
            process.kill()


class Nodes:
    """A cluster of several nodes on this machine: a head, and worker nodes with the label role=work.

    Args:
        folder: Folder of the nodes' logs.
        cpus: CPUs of each node. Default: 2.
    """

    def __init__(self, folder: Path, cpus: int = 2) -> None:
        self._folder, self._cpus = folder, cpus
        self._address = self._api = ""
        self._settings = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_health_check_period_ms": "1000",  # a lost node is detected after 5 s instead of 15 s
            # The machine may be busy.
            "RAY_worker_niceness": "0",
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_agent_register_timeout_ms": "120000",
            "NO_COLOR": "1",
        }
        self._all: list[Node] = []
        self.work: list[Node] = []

    def __enter__(self) -> Nodes:
        port, dashboard = free_ports(2)
        self._address, self._api = f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}"
        try:
            self._start(
                self._cpus, "--head", f"--port={port}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        for node in reversed(self._all):
            node.end()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a command that uses this cluster."""
        return {**self._settings, "RAY_ADDRESS": self._address, "RAY_API_SERVER_ADDRESS": self._api}

    def ensure(self, number: int) -> None:
        """Start worker nodes until `number` are up."""
        self.work = [node for node in self.work if node.is_up]
        for _ in range(number - len(self.work)):
            self.work.append(self.start(self._cpus))

    def start(self, cpus: int, *options: str) -> Node:
        """Start a worker node with further options of `ray start`."""
        return self._start(cpus, f"--address={self._address}", "--labels=role=work", *options)

    def _start(self, cpus: int, *options: str) -> Node:
        log = self._folder / f"node-{secrets.token_hex(3)}.log"
        ray = str(Path(sys.executable).with_name("ray"))
        # If its agents choose their ports, a raylet waits for them to report these, and times out on a busy machine.
        ports = [f"--{agent}-port={port}" for agent, port in zip(_AGENTS, free_ports(len(_AGENTS)), strict=True)]
        command = [ray, "start", "--block", f"--num-cpus={cpus}", *ports, *options]
        with open(log, "wb") as output:
            node = Node(subprocess.Popen(command, stdout=output, stderr=output, env=self._settings), log)
        self._all.append(node)
        node.wait_for_ray()
        return node
