"""SIGKILL for processes, as a machine that dies would do it; and Ray nodes of our own to kill."""

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


def kill_actor(kind: str, how: signal.Signals = signal.SIGKILL, named: str = "") -> bool:
    """Kill the process of one live actor whose class name holds `kind`, or stop it; whether there was one.

    Args:
        kind: Part of its class's name.
        how: The signal.
        named: A pattern that its own name has.

    Ray lists an actor as alive for a moment after its process has ended: such a one is passed over.
    """
    from ray.util.state import list_actors

    for actor in list_actors(limit=1000):
        is_one = kind in actor.class_name and re.search(named, actor.name or "")
        if is_one and actor.state == "ALIVE" and actor.pid:
            try:
                os.kill(actor.pid, how)
            except ProcessLookupError:
                continue
            return True
    return False


def processes_of(parent: psutil.Process, kind: str) -> list[psutil.Process]:
    """Live processes below a process that are raylets, or actors of a class, the oldest first.

    While an actor works, its process has the name of what it does as a title: a builder's is `ray::embed shard 3`.
    """
    words = ("EmbeddingActor", "embed shard") if kind == "EmbeddingActor" else (kind,)
    found = []
    for process in parent.children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            is_one = process.name() == kind or (title.startswith("ray::") and any(word in title for word in words))
            if is_one and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.create_time(), process))
        except psutil.NoSuchProcess:
            continue
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


class Node:
    """One node of a cluster, as `ray start --block` starts it.

    Args:
        process: Of that command.
        log: What it tells.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    @property
    def is_up(self) -> bool:
        """Whether its raylet lives."""
        return self._process.poll() is None and bool(self.processes("raylet"))

    def wait_for_ray(self) -> None:
        """Return when work can be put on it."""
        for _ in range(1800):
            if "Ray runtime started" in self._log.read_text():
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.1)
        raise TimeoutError(f"a node did not start: {self._log.read_text()[-2000:]}")

    def processes(self, kind: str) -> list[psutil.Process]:
        """Its live processes of a kind, the oldest first; see `processes_of`."""
        return processes_of(psutil.Process(self._process.pid), kind)

    def kill(self) -> None:
        """SIGKILL to its raylet, as if the machine had lost its power: what the raylet had started ends by itself."""
        for raylet in self.processes("raylet"):
            raylet.kill()

    def end(self) -> None:
        """Stop it, and whatever it left behind."""
        left = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        self._process.terminate()
        self._process.wait(timeout=60)
        for process in psutil.wait_procs(left, timeout=10)[1]:
            process.kill()


class Nodes:
    """A cluster of several nodes on this machine: a head, and nodes for the work, with the label role=work.

    Args:
        folder: For the nodes' logs.
        cpus: Of each node.
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
            "RAY_health_check_period_ms": "1000",  # a node that is gone is missed after 5 s instead of 15
            # The machine may be busy with other things.
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
            self._start("--head", f"--port={port}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        for node in reversed(self._all):
            node.end()

    @property
    def environment(self) -> dict[str, str]:
        """Of a command that shall work on this cluster."""
        return {**self._settings, "RAY_ADDRESS": self._address, "RAY_API_SERVER_ADDRESS": self._api}

    def ensure(self, number: int) -> None:
        """Start as many nodes for the work as are lacking."""
        self.work = [node for node in self.work if node.is_up]
        for _ in range(number - len(self.work)):
            self.work.append(self._start(f"--address={self._address}", "--labels=role=work"))

    def _start(self, *options: str) -> Node:
        log = self._folder / f"node-{secrets.token_hex(3)}.log"
        ray = str(Path(sys.executable).with_name("ray"))
        # Left to choose its agents' ports, a raylet waits for their word, and on a busy machine gives up.
        ports = [f"--{agent}-port={port}" for agent, port in zip(_AGENTS, free_ports(len(_AGENTS)), strict=True)]
        command = [ray, "start", "--block", f"--num-cpus={self._cpus}", *ports, *options]
        with open(log, "wb") as told:
            node = Node(subprocess.Popen(command, stdout=told, stderr=told, env=self._settings), log)
        self._all.append(node)
        node.wait_for_ray()
        return node
