"""Ray on this machine and on the cluster that RAY_ADDRESS names: versions, its token, and who can reach its ports."""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from distcse.errors import StorageError
from distcse.health.check import Check, fail, ok, warn
from distcse.storage import RemotePath, probe
from distcse.storage import to_uri as named

_DASHBOARD = 8265
_CLIENT = 10001
_LOOPBACK = ("127.", "::1")


def driver_version() -> list[Check]:
    """Ray here, of the line that distcse knows."""
    try:
        told = version("ray")
    except PackageNotFoundError:
        return [fail("ray", "not installed", 'pip install -c constraints.txt "ray[default,train,tune]"')]
    major, minor = (int(part) for part in told.split(".")[:2])
    if (2, 60) <= (major, minor) < (2, 62):
        return [ok("ray", told)]
    return [fail("ray", told, 'pip install "ray[default,train,tune]>=2.60,<2.62"')]


def cluster(shared: Mapping[str, Path] | None = None) -> list[Check]:
    """The nodes of the cluster at RAY_ADDRESS: their Ray and Python, and whether they see the run's folders.

    Args:
        shared: Folders that all nodes should see, by the knobs that name them; those that exist are tried.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        running = _running()
        if running is None:
            return [ok("cluster", "none; runs start one on this machine, for themselves")]
        return [ok("cluster", f"one runs at {running}, not joined; export RAY_ADDRESS={running} to run there")]
    import ray

    was_up = ray.is_initialized()
    try:
        if not was_up:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        return _nodes(address, shared or {})
    except (
        Exception
    ) as mistake:  # Ray raises what it likes where a cluster cannot be joined; all of it is a failed check
        told = f"cannot join {address}: {' '.join(str(mistake).split())[:200]}"
        return [
            fail(
                "cluster",
                told,
                "check RAY_ADDRESS, RAY_AUTH_MODE and RAY_AUTH_TOKEN, and that versions are the same",
            )
        ]
    finally:
        if not was_up:
            ray.shutdown()


def _nodes(address: str, shared: Mapping[str, Path]) -> list[Check]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from distcse.ray_backend.shared_storage import unseen

    alive = [node for node in ray.nodes() if node["Alive"]]
    ask = ray.remote(num_cpus=0)(_about_node)
    buckets = [folder for folder in shared.values() if isinstance(folder, RemotePath)]
    asked = {
        node["NodeManagerAddress"]: ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(buckets)
        for node in alive
    }
    found, mine = [], _about_node([])
    resources = ray.cluster_resources()
    told = f"{address}: {len(alive)} nodes, {resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"
    for node, answer in asked.items():
        theirs = ray.get(answer, timeout=60)
        for kind in ("ray", "python", "torch", "distcse"):
            if theirs[kind] != mine[kind]:
                what = f"node {node} has {kind} {theirs[kind]}, this machine {mine[kind]}"
                found.append(fail("cluster", what, f"install {kind} {mine[kind]} there"))
        missing = [named(folder) for folder in buckets if named(folder) not in theirs["sees"]]
        if missing:
            found.append(
                fail("cluster", f"node {node} does not see {missing[0]}", "object storage wants credentials there")
            )
    folders = {knob: folder for knob, folder in shared.items() if folder not in buckets and folder.is_dir()}
    for node, problem in unseen(folders, {}, [None]).items():
        what, _, fix = problem.partition("; ")
        found.append(fail("cluster", f"node {node} {what}", fix))
    return found or [ok("cluster", f"{told}; all with ray {mine['ray']} and python {mine['python']}")]


def _about_node(buckets: Sequence[RemotePath]) -> dict[str, Any]:
    """What a node says of itself."""
    import platform

    def told(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    versions = {package: told(package) for package in ("ray", "torch", "distcse")}
    return {
        **versions,
        "python": platform.python_version(),
        "sees": [named(folder) for folder in buckets if _sees(folder)],
    }


def _sees(bucket: RemotePath) -> bool:
    try:
        probe(bucket)
    except StorageError:  # why is told of this machine, by the check of its storage
        return False
    return True


def token(environment: Mapping[str, str] | None = None, home: Path | None = None) -> list[Check]:
    """Whether Ray asks for a token, and whether others can read it."""
    told = os.environ if environment is None else environment
    mode, address = told.get("RAY_AUTH_MODE", ""), told.get("RAY_ADDRESS", "")
    file = (Path.home() if home is None else home) / ".ray" / "auth_token"
    found = []
    if mode == "disabled":
        fix = "export RAY_AUTH_MODE=token in every shell: who reaches the ports runs what he likes"
        found.append(warn("ray token", "RAY_AUTH_MODE is disabled", fix))
    elif (
        mode == "token"
        and address
        and not (told.get("RAY_AUTH_TOKEN") or told.get("RAY_AUTH_TOKEN_PATH") or file.exists())
    ):
        found.append(
            fail(
                "ray token",
                "RAY_AUTH_MODE is token, and no token is here",
                "export RAY_AUTH_TOKEN, or copy ~/.ray/auth_token",
            )
        )
    elif not mode and address:
        found.append(
            warn("ray token", "RAY_AUTH_MODE is not set", "export RAY_AUTH_MODE=token if the cluster asks for one")
        )
    else:
        found.append(ok("ray token", "asked for" if mode else "asked for by the clusters that runs start here"))
    if file.exists() and stat.S_IMODE(file.stat().st_mode) & 0o077:
        found.append(warn("ray token file", f"{file} can be read by others", f"chmod 600 {file}"))
    return found


def exposed_ports(ports: Sequence[int] = (_DASHBOARD, _CLIENT), tables: Sequence[Path] | None = None) -> list[Check]:
    """Whether Ray's job port or client port listens beyond this machine: who reaches it without a token runs code here.

    Args:
        ports: To look for.
        tables: The kernel's lists of sockets.
    """
    asked = os.environ.get("RAY_API_SERVER_ADDRESS", "").rpartition(":")[2]
    wanted = {*ports, *([int(asked)] if asked.isdigit() else [])}
    listening = _listening((Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if tables is None else tables)
    open_to_all = sorted({port for address, port in listening if port in wanted and not address.startswith(_LOOPBACK)})
    if not open_to_all:
        local = sorted({port for _, port in listening if port in wanted})
        return [
            ok(
                "ray ports",
                f"{', '.join(map(str, local))} on loopback alone" if local else "no dashboard or client port is open",
            )
        ]
    told = f"port {', '.join(map(str, open_to_all))} listens beyond loopback"
    fix = "start the head with --dashboard-host=127.0.0.1 and without a client port, and reach it through ssh"
    guarded = os.environ.get("RAY_AUTH_MODE") == "token"
    return [warn("ray ports", f"{told}, guarded by a token", fix) if guarded else fail("ray ports", told, fix)]


def _listening(tables: Sequence[Path]) -> list[tuple[str, int]]:
    """(address, port) of sockets that wait for others, of all users."""
    found = []
    for table in tables:
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            fields = line.split()
            if fields[3] != "0A":  # LISTEN
                continue
            address, _, port = fields[1].partition(":")
            found.append((_readable(address), int(port, 16)))
    return found


def _readable(address: str) -> str:
    """The kernel writes addresses as words of the machine's byte order."""
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    raw = b"".join(words)
    readable = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
    return readable.removeprefix("::ffff:")


def _running() -> str | None:
    """The address of a cluster that was started on this machine and still answers."""
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        address = file.read_text().strip()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=1):
            return address
    except (OSError, ValueError):  # no file, or what it names has ended
        return None
