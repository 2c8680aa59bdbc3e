"""Whether the nodes that will work see the same folders: tried before any work, by files written here and read there."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distcse.errors import SharedStorageError
from distcse.files import write_text_atomic
from distcse.storage import RemotePath

_PATIENCE = 120
"""Seconds for a node to answer: a process is started on it, and a network file system may sleep."""

Places = Mapping[str, Path]
"""Folders by the knob that names them."""


def require_shared(written: Places, read: Places, labels: Sequence[Mapping[str, str] | None]) -> None:
    """Raise `RunError`, naming the node, the folder and the knob, where a node that may work does not see what this one does.

    Args:
        written: Folders that the run writes and reads on several nodes; they exist here. Those in object storage are seen from
            everywhere.
        read: Files and folders that it reads only. What does not exist here is a name that each node resolves for itself.
        labels: Of the nodes that may work; None is any node.
    """
    for address, problem in unseen(written, read, labels).items():
        raise SharedStorageError(f"node {address} {problem}")


def unseen(written: Places, read: Places, labels: Sequence[Mapping[str, str] | None]) -> dict[str, str]:
    """What nodes that may work do not see, by their addresses, in words that follow these; see `require_shared`."""
    nodes = _others(labels)
    if not nodes:
        return {}
    token = secrets.token_hex(6)
    marks = {
        knob: folder / f".distcse-seen-{token}"
        for knob, folder in written.items()
        if not isinstance(folder, RemotePath)
    }
    here = {knob: folder for knob, folder in read.items() if folder.exists()}
    try:
        for mark in marks.values():
            write_text_atomic(mark, token)
        answers = _asked(nodes, marks, here, token)
        return {address: problem for address, problem in answers.items() if problem is not None}
    finally:
        for mark in marks.values():
            mark.unlink(missing_ok=True)


def _others(labels: Sequence[Mapping[str, str] | None]) -> dict[str, str]:
    """Addresses of the nodes that may work, this one apart, by their ids."""
    mine = ray.get_runtime_context().get_node_id()
    return {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] != mine
        if any((wanted or {}).items() <= node["Labels"].items() for wanted in labels)
    }


def _asked(nodes: Mapping[str, str], marks: Places, read: Places, token: str) -> dict[str, str | None]:
    """What each node, by its address, does not see; None where it sees all."""
    looks = ray.remote(num_cpus=0, max_retries=0)(look)
    answers = {
        address: looks.options(
            name="look for shared storage", scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(marks, read, token, node)
        for node, address in nodes.items()
    }
    found: dict[str, str | None] = {}
    for address, answer in answers.items():
        try:
            found[address] = ray.get(answer, timeout=_PATIENCE)
        except GetTimeoutError:
            found[address] = (
                f"did not look at storage.runs within {_PATIENCE} s; take it out of the cluster, or mend it"
            )
        except RayError as failed:
            told = str(failed).strip().splitlines()[-1]
            found[address] = (
                f"cannot work for this run: {told}; is the same distcse installed there? distcse.doctor compares"
            )
    return found


def look(marks: Places, read: Places, token: str, node: str) -> str | None:
    """On the node of that id: what is wrong with what it sees, in words that follow its name."""
    for knob, mark in marks.items():
        beside = mark.with_name(f"{mark.name}-{node}")  # nodes look at the same time: each writes a file of its own
        try:
            if mark.read_text() != token:
                return f"reads another file than was written at {mark.parent}, {knob}; mend that file system"
        except OSError:
            return (
                f"does not see what is written to {mark.parent}, {knob}; set {knob} to a folder on storage that all nodes share, "
                "or keep the work on nodes that see it: training.node_labels and teachers.node_labels, or groups.N.node_labels"
            )
        try:
            beside.write_text(token)
            beside.unlink()
        except OSError as refused:
            return f"cannot write in {mark.parent}, {knob}: {refused.strerror}; let all nodes write there"
    for knob, place in read.items():
        if not place.exists():
            return f"has no {place}, {knob}; put it on storage that all nodes share, or at the same place on each"
    return None
