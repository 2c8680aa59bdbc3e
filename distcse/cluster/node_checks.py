"""Checks that all nodes see the same files and buckets, and have the same versions and time, by a task on each."""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Mapping, Sequence

import ray
from ray.exceptions import GetTimeoutError, RayError

from distcse.cluster.nodes import alive, ask_nodes
from distcse.devices.cluster import Labels, Paths
from distcse.devices.host import installed_version
from distcse.devices.resources import Node
from distcse.errors import SharedStorageError, StorageError, last_line
from distcse.storage import ArtifactStore, open_store, write_text_atomic

_ANSWER_TIMEOUT_S = 120
"""Seconds for a node to answer: it starts a process, and a network file system can be slow at first."""
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
        began = time.time()
        arguments = check_node, versions(), buckets, markers, existing, token
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
    expected: Mapping[str, str], buckets: Mapping[str, ArtifactStore], markers: Paths, read: Paths, token: str
) -> tuple[str | None, float]:
    """On another node: return what makes it unlike the driver's, if anything, and its time."""
    own = versions()
    found = [
        f"has {name} {own[name]}, this machine {version}; install {name} {version} there"
        for name, version in expected.items()
        if own[name] != version and own[name] and version  # a job's working directory is not installed
    ]
    if not found:
        found = [problem for key, bucket in buckets.items() if (problem := _probe(key, bucket)) is not None]
    return (found[0] if found else check_paths(markers, read, token)), time.time()


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
