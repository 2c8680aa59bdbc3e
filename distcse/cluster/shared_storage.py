"""Checks that all nodes see the same folders, by writing files on this node and reading them on the others."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import ray
from ray.exceptions import GetTimeoutError, RayError

from distcse.cluster.nodes import alive, ask_nodes
from distcse.devices.cluster import Labels, Paths
from distcse.devices.resources import Node
from distcse.errors import SharedStorageError, last_line
from distcse.storage import open_store, write_text_atomic

_ANSWER_TIMEOUT_S = 120
"""Seconds for a node to answer: it starts a process, and a network file system can be slow at first."""


def require_shared(written: Paths, read: Paths, labels: Sequence[Labels]) -> None:
    """Check that every node which can get work sees the same files as this node; see `Cluster.require_shared`."""
    for address, problem in find_unshared(written, read, labels).items():
        raise SharedStorageError(f"node {address} {problem}")


def find_unshared(written: Paths, read: Paths, labels: Sequence[Labels]) -> dict[str, str]:
    """Return a problem for each node that does not see the same files, by the node's address; see `require_shared`.

    A problem continues a sentence that begins with the node's address.
    """
    nodes = other_nodes(labels)
    if not nodes:
        return {}
    token = secrets.token_hex(6)
    markers = {
        key: folder / f".distcse-seen-{token}" for key, folder in written.items() if not open_store(folder).is_remote
    }
    existing = {key: path for key, path in read.items() if path.exists()}
    try:
        for marker in markers.values():
            write_text_atomic(marker, token)
        arguments = check_paths, markers, existing, token
        answers = ask_nodes(nodes, *arguments, timeout_s=_ANSWER_TIMEOUT_S, name="check shared storage")
        problems = {node.address: _problem_of(answers[node.id]) for node in nodes}
        return {address: problem for address, problem in problems.items() if problem is not None}
    finally:
        for marker in markers.values():
            marker.unlink(missing_ok=True)


def other_nodes(labels: Sequence[Labels]) -> list[Node]:
    """Return the nodes that can get work, except this one."""
    own_id = ray.get_runtime_context().get_node_id()
    return [node for node in alive() if node.id != own_id and any(node.has(required) for required in labels)]


def _problem_of(answer: str | RayError | None) -> str | None:
    if isinstance(answer, GetTimeoutError):
        return f"did not check storage.runs within {_ANSWER_TIMEOUT_S} s; repair it, or remove it from the cluster"
    if isinstance(answer, RayError):
        return (
            f"cannot work for this run: {last_line(answer)}; install the same distcse there (distcse doctor compares "
            "versions)"
        )
    return answer


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
