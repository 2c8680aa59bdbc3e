"""Ray actors that host frozen teachers and serve training workers.

A worker sends row ids and receives similarity lists; vectors, tokens and weights are never sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property, partial
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distcse.cluster.assigned_resources import use_gpus, use_threads
from distcse.cluster.heartbeat import RESTARTABLE, HeartbeatActor, HeartbeatMonitor
from distcse.cluster.nodes import alive
from distcse.cluster.versions import prefer_node
from distcse.errors import DistcseError, TeacherServerError, last_line
from distcse.events import Reporter, WaitWarning
from distcse.recipe import TeacherSection, TeachersSection
from distcse.teachers.resources import server_resources
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import Teacher, open_table_teacher

if TYPE_CHECKING:
    from distcse.text import Corpus

T = TypeVar("T")

_POLL_S = 1.0
_MAX_PENDING = 2
"""Maximum number of pending requests of one worker to a server: the next block, and the one after it."""


class TeacherServer(HeartbeatActor):
    """Actor that hosts one teacher and serves its lists."""

    def __init__(self, make_teacher: Callable[[], Teacher]) -> None:
        use_gpus()
        self._make_teacher = make_teacher

    @cached_property
    def _teacher(self) -> Teacher:
        teacher = self._make_teacher()
        use_threads()
        return teacher

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """See `Teacher.similarities`."""
        return self._teacher.similarities(columns, rows)

    def ready(self) -> bool:
        """Load the teacher, and return when it is loaded."""
        return self._teacher is not None


def server_of(pool: Sequence[T], run: str, worker: int) -> T:
    """Select a worker's server from a pool, round robin by rank.

    The run's name determines the server of rank 0, so that a sweep's trials with one worker each use all servers.
    """
    return pool[(zlib.crc32(run.encode()) + worker) % len(pool)]


class TeacherServerPool:
    """Actor that starts a run's teacher servers, each on the node of the worker that requests it first, and owns them.

    Placement on the worker's node is preferred, not required: a server starts elsewhere if that node lacks resources or the
    labels of `teachers.node_labels`. A running server stays on its node when its worker restarts on another.
    """

    def __init__(
        self,
        factories: Mapping[int, tuple[Callable[[], Teacher], dict[str, float]]],
        section: TeachersSection,
        owner: str,
    ) -> None:
        self._factories, self._section, self._owner = factories, section, owner
        self._running: dict[tuple[int, int], Any] = {}

    def get_servers(self, run: str, worker: int, node: str) -> dict[int, Any]:
        """Return a worker's server for each teacher, by teacher index; start missing servers on the node with id `node`."""
        copy = server_of(range(self._section.num_servers), run, worker)
        self.start(copy, node)
        return {number: self._running[number, copy] for number in self._factories}

    def start(self, copy: int, node: str) -> None:
        """Start copy `copy` of each teacher's server on the node with id `node`, unless it runs."""
        for number, (make, resources) in self._factories.items():
            if (number, copy) not in self._running:
                server = ray.remote(**resources, **RESTARTABLE)(TeacherServer).options(
                    name=f"teacher-{number}-{copy}-{self._owner}",
                    **placement_options(node, self._section.node_labels, needs_resources=any(resources.values())),
                )
                self._running[number, copy] = server.remote(make)

    def running(self) -> dict[str, Any]:
        """Return all running servers, by their names in messages."""
        teachers = self._section.encoders
        return {
            f"server {copy} of teacher {number}, {teachers[number].backbone}": server
            for (number, copy), server in self._running.items()
        }


def placement_options(node: str, labels: dict[str, str] | None, needs_resources: bool) -> dict[str, Any]:
    """Return Ray's options that prefer a node for an actor, or select nodes by labels where the node lacks the labels."""
    node_labels = next(info["Labels"] for info in ray.nodes() if info["NodeID"] == node)
    if labels and not labels.items() <= node_labels.items():
        return {"label_selector": labels}
    # The labels also hold where a server starts on another node because this one is full.
    return {"label_selector": labels, "scheduling_strategy": prefer_node(node, spills_if_full=needs_resources)}


class RemoteTeacherClient:
    """`TeacherClient` of a server actor. If the server crashes, Ray restarts it and retries the pending requests.

    A worker has at most two pending requests per server; a third one blocks. This bounds the queue of a slow server.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self._slots = BoundedSemaphore(_MAX_PENDING)

    def request(self, columns: NDArray[np.int64], rows: slice) -> Future[NDArray[np.float32]]:
        self._slots.acquire()
        future: Future[NDArray[np.float32]] = self._server.similarities.remote(columns, rows).future()
        future.add_done_callback(lambda _: self._slots.release())
        return future


@contextmanager
def served(
    section: TeachersSection,
    corpus: Corpus,
    tables: Sequence[EmbeddingTable | None],
    gpus: float,
    reporter: Reporter,
    run: str,
    teacher_indices: Sequence[int] | None = None,
) -> Iterator[Any]:
    """Context manager: yield the handle of a run's `TeacherServerPool`, and restart servers that hang; None without servers.

    `tables` has None for a live teacher, and `teacher_indices` those that have servers (by default all).
    """
    factories: dict[int, tuple[Callable[[], Teacher], dict[str, float]]] = {}
    for number in range(len(tables)) if teacher_indices is None else teacher_indices:
        teacher, table = section.encoders[number], tables[number]
        if table is not None:
            make = partial(open_table_teacher, teacher, table)
        else:
            from distcse.teachers.kinds import open_live  # here: servers of tables do not import PyTorch

            make = partial(open_live, teacher, corpus.store, section.tokens_per_batch)
        factories[number] = make, server_resources(section, teacher, gpus)
    if not factories:
        yield None
        return
    owner = f"{run}-{ray.get_runtime_context().get_job_id()}"  # unique among the runs of a cluster
    # Pinned to the driver's node: losing another node must not end the pool, which would end all servers.
    driver_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    pool_class = ray.remote(num_cpus=0)(TeacherServerPool).options(
        name=f"servers-{owner}", scheduling_strategy=driver_node
    )
    pool = pool_class.remote(factories, section, owner)
    # On a single node the placement is known: start the servers while the trainer starts.
    if section.num_servers == 1 and len(nodes := alive()) == 1:
        pool.start.remote(0, nodes[0].id)
    try:
        timeout_s = section.heartbeat_timeout_s
        with HeartbeatMonitor(timeout_s, reporter.warn, lambda: ray.get(pool.running.remote(), timeout=timeout_s)):
            yield pool
    finally:
        ray.kill(pool)


def co_located_servers(
    servers: Any, section: TeachersSection, run: str, worker: int, reporter: Reporter
) -> dict[int, Any]:
    """In a worker: return its server for each teacher, by teacher index, and wait until the teachers are loaded.

    `servers` is what `served` yields.

    There is no time limit, because loading may include a download, and a node may join the cluster; a server that hangs is
    restarted. A server without a node is reported.
    """
    if servers is None:
        return {}
    node = ray.get_runtime_context().get_node_id()
    own_servers: dict[int, Any] = ray.get(servers.get_servers.remote(run, worker, node))
    for number, server in own_servers.items():
        teacher = section.encoders[number]
        has_started, is_ready = server.beat.remote(), server.ready.remote()
        warning = WaitWarning(reporter)
        while not ray.wait([is_ready], timeout=_POLL_S)[0]:
            reporter.check_stop(f"while teacher {teacher.backbone} was loaded")
            if not ray.wait([has_started], timeout=0)[0]:
                warning.check(f"the server of teacher {teacher.backbone} waits for a node with room for it")
        try:
            ray.get(is_ready)
        except RayTaskError as failed:
            raise cause_of(teacher, failed) from failed
    return own_servers


def cause_of(teacher: TeacherSection, failed: RayTaskError) -> DistcseError:
    """Unwrap a `DistcseError` from Ray's error; turn any other cause into an error that names the teacher."""
    if isinstance(failed.cause, DistcseError):
        return failed.cause
    return TeacherServerError(f"teacher {teacher.backbone} failed: {last_line(failed)}")
