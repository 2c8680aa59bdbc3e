"""Checks by a task on each node: whether all see the same files and buckets, have the same versions and time, and connect."""

from __future__ import annotations

import platform
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distcse.cluster.nodes import alive, ask_nodes
from distcse.devices.cluster import Labels, Paths
from distcse.devices.host import installed_version
from distcse.devices.resources import Node
from distcse.errors import SharedStorageError, StorageError, last_line
from distcse.storage import ArtifactStore, open_store, write_text_atomic

Peer = tuple[str, int, str]
"""Address and port of a node that listens, and the range of such ports."""
_ANSWER_TIMEOUT_S = 120
"""Seconds for a node to answer: it starts a process, and a network file system can be slow at first."""
_CONNECT_TIMEOUT_S = 10.0
"""Seconds for a connection between two nodes; a firewall that drops packets never answers."""
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""File with the ports that this machine gives to processes which ask for any."""
_CLOCK_S = 300.0
"""Seconds that clocks may differ: Kerberos refuses more, object storage more than 900."""


def require_alike(written: Paths, read: Paths, labels: Sequence[Labels]) -> None:
    """Check that every node which can get work is like this node; see `Cluster.require_alike`."""
    for address, problem in find_unlike(written, read, labels).items():
        raise SharedStorageError(f"node {address} {problem}")


def find_unlike(written: Paths, read: Paths, labels: Sequence[Labels]) -> dict[str, str]:
    """Return a problem for each node that is not like this one, by the node's address; see `require_alike`.

    A problem continues a sentence that begins with the node's address.
    """
    nodes = other_nodes(labels)
    if not nodes:
        return {}
    token = secrets.token_hex(6)
    stores = {key: open_store(folder) for key, folder in written.items()}
    markers = {key: folder / f".distcse-seen-{token}" for key, folder in written.items() if not stores[key].is_remote}
    buckets = {key: store for key, store in stores.items() if store.is_remote}
    existing = {key: path for key, path in read.items() if path.exists()}
    try:
        for marker in markers.values():
            write_text_atomic(marker, token)
        with listening(nodes[0]) as peer:
            began = time.time()
            arguments = check_node, versions(), buckets, markers, existing, token, peer
            answers = ask_nodes(nodes, *arguments, timeout_s=_ANSWER_TIMEOUT_S, name="check nodes")
            ended = time.time()
        problems = {node.address: _problem_of(answers[node.id], began, ended) for node in nodes}
        return {address: problem for address, problem in problems.items() if problem is not None}
    finally:
        for marker in markers.values():
            marker.unlink(missing_ok=True)


def other_nodes(labels: Sequence[Labels]) -> list[Node]:
    """Return the nodes that can get work, except this one."""
    own_id = ray.get_runtime_context().get_node_id()
    return [node for node in alive() if node.id != own_id and any(node.has(required) for required in labels)]


class Listener:
    """Holds a free port, as a training worker does for the others; it accepts connections and answers none."""

    def __init__(self) -> None:
        self._server = socket.create_server(("", 0), backlog=1024)

    def port(self) -> tuple[int, str]:
        """Return the port, and the range from which this machine takes such ports."""
        span = "-".join(_PORT_RANGE.read_text().split()) if _PORT_RANGE.exists() else "1024-65535"
        return self._server.getsockname()[1], span


@contextmanager
def listening(node: Node) -> Iterator[Peer | None]:
    """Context manager: listen on a node; None if it does not start a process, which its own check reports."""
    on = NodeAffinitySchedulingStrategy(node.id, soft=False)
    actor = ray.remote(num_cpus=0)(Listener).options(scheduling_strategy=on).remote()
    try:
        try:
            peer = node.address, *ray.get(actor.port.remote(), timeout=_ANSWER_TIMEOUT_S)
        except RayError:
            peer = None
        yield peer
    finally:
        ray.kill(actor)


def _problem_of(answer: tuple[str | None, float] | RayError, began: float, ended: float) -> str | None:
    if isinstance(answer, GetTimeoutError):
        return f"did not check storage.runs within {_ANSWER_TIMEOUT_S} s; repair it, or remove it from the cluster"
    if isinstance(answer, RayError):
        return (
            f"cannot work for this run: {last_line(answer)}; install the same distcse there (distcse doctor compares "
            "versions)"
        )
    problem, clock = answer
    return problem or clock_problem(clock, began, ended)


def clock_problem(clock: float, began: float, ended: float) -> str | None:
    """Return how far a clock that was read between two times of this machine's is off, if that is too far."""
    ahead, behind = clock - ended, began - clock
    if max(ahead, behind) <= _CLOCK_S:
        return None
    off = f"{ahead:,.0f} s ahead of" if ahead > 0 else f"{behind:,.0f} s behind"
    return f"has a clock {off} this machine's; synchronize both (chrony), or storage refuses its requests"


def versions() -> dict[str, str]:
    """Return the versions that nodes must share. Builds of PyTorch for CPUs and GPUs count as the same."""
    packages = {name: installed_version(name, "").partition("+")[0] for name in ("ray", "torch", "distcse")}
    return {"python": platform.python_version(), **packages}


def check_node(
    expected: Mapping[str, str],
    buckets: Mapping[str, ArtifactStore],
    markers: Paths,
    read: Paths,
    token: str,
    peer: Peer | None,
) -> tuple[str | None, float]:
    """On another node: return what makes it unlike the driver's or cut off from `peer`, if anything, and its time."""
    own = versions()
    found = [
        f"has {name} {own[name]}, this machine {version}; install {name} {version} there"
        for name, version in expected.items()
        if own[name] != version and own[name] and version  # a job's working directory is not installed
    ]
    if not found:
        found = [problem for key, bucket in buckets.items() if (problem := _probe(key, bucket)) is not None]
    problem = found[0] if found else check_paths(markers, read, token)
    return problem or (None if peer is None else check_connection(*peer)), time.time()


def check_connection(address: str, port: int, span: str) -> str | None:
    """On another node: return why it cannot connect to a port of a node, if so, as workers of a run connect."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or "no answer"
        return f"cannot connect to port {port} of node {address} ({reason}); open TCP ports {span} between nodes"
    return None


def _probe(key: str, bucket: ArtifactStore) -> str | None:
    try:
        bucket.probe()
    except StorageError as error:
        return f"cannot use {bucket.uri}, {key} ({error}); set the storage's credentials on the node"
    return None


def check_paths(markers: Paths, read: Paths, token: str) -> str | None:
    """On another node: return why it does not see the marker files or the paths that are read, if so."""
    for key, marker in markers.items():
        own_marker = marker.with_name(f"{marker.name}-{secrets.token_hex(4)}")  # nodes run this concurrently
        try:
            if marker.read_text() != token:
                return f"reads another file than was written at {marker.parent}, {key}; fix that file system"
        except OSError:
            return (
                f"does not see what is written to {marker.parent}, {key}; set {key} to a folder on storage that all nodes share, "
                "or keep the work on nodes that see it: training.node_labels and teachers.node_labels, or groups.N.node_labels"
            )
        try:
            own_marker.write_text(token)
            own_marker.unlink()
        except OSError as error:
            return f"cannot write in {marker.parent}, {key}: {error.strerror}; let all nodes write there"
    for key, path in read.items():
        if not path.exists():
            return f"has no {path}, {key}; put it on storage that all nodes share, or at the same path on each node"
    return None
