"""Ray actors that host frozen teachers and answer workers.

This file, `builders.py` and `pulse.py` are the only ones of this folder that import Ray. Between worker and server go row ids
one way and lists the other way: never vectors, tokens or weights.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distcse.errors import DistcseError, TeacherError, TeacherServerError
from distcse.events import LogMessage, Reporter
from distcse.ray_backend.nodes import ResourceRequest, alive
from distcse.recipe import TeacherSection, TeachersSection
from distcse.teachers.heartbeat import RESTARTABLE, HeartbeatActor, HeartbeatMonitor
from distcse.teachers.serving import serving
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import Teacher

if TYPE_CHECKING:
    from distcse.data import Corpus

T = TypeVar("T")

_UNDER_WAY = 2
"""Questions of one worker that a server has at a time: the block that is wanted next, and the one after it."""


class TeacherServer(HeartbeatActor):
    """Hosts one teacher and serves its lists."""

    def __init__(self, make_teacher: Callable[[], Teacher]) -> None:
        use_assigned_gpus()
        self._make_teacher = make_teacher

    @cached_property
    def _teacher(self) -> Teacher:
        teacher = self._make_teacher()
        use_assigned_threads()
        return teacher

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """See `Teacher.similarities`."""
        return self._teacher.similarities(columns, rows)

    def ready(self) -> bool:
        """Answers once the teacher is loaded."""
        return self._teacher is not None


def server_of(pool: Sequence[T], run: str, worker: int) -> T:
    """The server of a pool that a worker asks. A run's workers take turns; where they begin is drawn by the run's name, so
    that trials of one worker share a pool too."""
    return pool[(zlib.crc32(run.encode()) + worker) % len(pool)]


class TeacherServerPool:
    """The server actors of a run, each started beside the worker that first asks for it; itself an actor, and they end with it.

    Beside is wished for, not insisted on: where the worker's node has no room, or has other labels than `teachers.node_labels`, a
    server is put where there is room. One that lives stays where it is, also when its worker is started again elsewhere.

    Args:
        makes: For each teacher, by its number, what makes it, and the CPUs and GPUs of one server.
        section: How many servers, and where.
        job: Part of the servers' names.
    """

    def __init__(
        self, makes: Mapping[int, tuple[Callable[[], Teacher], dict[str, float]]], section: TeachersSection, job: str
    ) -> None:
        self._makes, self._section, self._job = makes, section, job
        self._running: dict[tuple[int, int], Any] = {}

    def near(self, run: str, worker: int, node: str) -> dict[int, Any]:
        """For each teacher, by its number, the server that a run's worker, on a node of this id, shall ask."""
        copy = server_of(range(self._section.num_servers), run, worker)
        self.start(copy, node)
        return {number: self._running[number, copy] for number in self._makes}

    def start(self, copy: int, node: str) -> None:
        """Start the servers of a number beside a node of this id, unless they run."""
        for number, (make, resources) in self._makes.items():
            if (number, copy) not in self._running:
                server = ray.remote(**resources, **RESTARTABLE)(TeacherServer).options(
                    name=f"teacher-{number}-{copy}-{self._job}",
                    **_near(node, self._section.node_labels, takes_room=any(resources.values())),
                )
                self._running[number, copy] = server.remote(make)

    def running(self) -> dict[str, Any]:
        """All servers there are, by what to call them."""
        teachers = self._section.encoders
        return {
            f"server {copy} of teacher {number}, {teachers[number].backbone}": server
            for (number, copy), server in self._running.items()
        }


def _near(node: str, labels: dict[str, str] | None, takes_room: bool) -> dict[str, Any]:
    """Ray's options for an actor near a node, among the nodes of some labels; elsewhere where it takes room and there is none."""
    has = next(there["Labels"] for there in ray.nodes() if there["NodeID"] == node)
    if labels and not labels.items() <= has.items():
        return {"label_selector": labels}
    # A node that is full may stay so: its own workers fill it. Ray's switch for spilling is private, and there is no other.
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=takes_room)}


class RemoteTeacherClient:
    """A teacher behind a server actor, as a worker's `TeacherClient`. Calls outlive the server: Ray restarts and retries.

    A third question waits for the first one's answer, so that the queue of a server that is slower than its workers ends at
    two blocks a worker.

    Args:
        server: A `TeacherServer` actor.
        asked: Told of every question, by its answer to come.
    """

    def __init__(self, server: Any, asked: Callable[[Future[NDArray[np.float32]]], None]) -> None:
        self._server = server
        self._asked = asked
        self._room = BoundedSemaphore(_UNDER_WAY)

    def request(self, columns: NDArray[np.int64], rows: slice) -> Future[NDArray[np.float32]]:
        self._room.acquire()
        answer: Future[NDArray[np.float32]] = self._server.similarities.remote(columns, rows).future()
        self._asked(answer)
        answer.add_done_callback(lambda _: self._room.release())
        return answer


@contextmanager
def served(
    section: TeachersSection,
    corpus: Corpus,
    tables: Sequence[EmbeddingTable | None],
    reporter: Reporter,
    asked: Sequence[int] | None = None,
) -> Iterator[Any]:
    """The `TeacherServerPool` of a run, for as long as this is entered; a server that hangs is replaced.

    Args:
        section: The teachers.
        corpus: What they are asked about.
        tables: The table of each; one that has none answers live.
        reporter: Receives warnings of unresponsive actors.
        asked: Numbers of the teachers that have servers; None are all.
    """
    makes: dict[int, tuple[Callable[[], Teacher], dict[str, float]]] = {}
    for number in range(len(tables)) if asked is None else asked:
        teacher, table = section.encoders[number], tables[number]
        make = (
            _table_teacher(teacher, table)
            if table is not None
            else _live_teacher(teacher, corpus.directory, section.tokens_per_batch)
        )
        makes[number] = make, _server_resources(section, teacher)
    job = _run_token()
    # On the driver's node: with no other it shall be lost, as its servers end with it.
    home = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    servers = ray.remote(num_cpus=0)(TeacherServerPool).options(name=f"servers-{job}", scheduling_strategy=home)
    running = servers.remote(makes, section, job)
    # Where there is one node there is no other place for them: they start while the trainer does.
    if section.num_servers == 1 and len(nodes := alive()) == 1:
        running.start.remote(0, nodes[0].id)
    try:
        with guarded(section, reporter, lambda: ray.get(running.running.remote(), timeout=section.heartbeat_timeout_s)):
            yield running
    finally:
        ray.kill(running)


def guarded(
    section: TeachersSection, reporter: Reporter, find: Callable[[], Mapping[str, Any]] | None = None
) -> HeartbeatMonitor:
    """A `HeartbeatMonitor` by `teachers.heartbeat_timeout_s` that warns the reporter."""
    return HeartbeatMonitor(
        section.heartbeat_timeout_s, lambda told: reporter.emit(LogMessage(told, warning=True)), find
    )


def co_located_servers(servers: Any, section: TeachersSection, run: str, worker: int) -> dict[int, Any]:
    """In a worker: the server that it shall ask, loaded, by the teacher's number. A teacher's mistake comes as it is."""
    node = ray.get_runtime_context().get_node_id()
    mine: dict[int, Any] = ray.get(servers.near.remote(run, worker, node))
    for number, server in mine.items():
        teacher = section.encoders[number]
        try:
            ray.get(server.ready.remote())
        except RayTaskError as failed:
            raise cause_of(teacher, failed) from failed
    return mine


def cause_of(teacher: TeacherSection, failed: RayTaskError) -> DistcseError:
    """A mistake of the user's as it is; anything else with the teacher's name."""
    return failed.cause if isinstance(failed.cause, DistcseError) else _told(teacher, failed)


def _told(teacher: TeacherSection, failed: RayTaskError) -> TeacherError:
    return TeacherServerError(f"teacher {teacher.backbone} failed: {str(failed).strip().splitlines()[-1]}")


def _table_teacher(teacher: TeacherSection, table: EmbeddingTable) -> Callable[[], Teacher]:
    directory, identity = table.directory, table.identity
    return lambda: serving(teacher, EmbeddingTable(directory, identity))


def _live_teacher(teacher: TeacherSection, corpus: Path, tokens_per_batch: int) -> Callable[[], Teacher]:
    from distcse.teachers.factory import live_at  # by its server too, when it is told of this

    return partial(live_at, teacher, corpus, tokens_per_batch)


def server_demands(section: TeachersSection) -> list[ResourceRequest]:
    """What servers of live teachers take, and those that rank on a GPU; those that read cosines from a table take nothing."""
    from distcse.teachers.factory import uses_table

    live = [teacher for teacher in section.encoders if not uses_table(section, teacher)]
    ranking = [teacher for teacher in section.encoders if uses_table(section, teacher) and teacher.similarity == "rank"]
    found = []
    for teachers, kind, instead in (
        (live, "live teacher servers", "use teachers.mode=table"),
        (ranking if section.gpus_per_actor else [], "servers of rank space", ""),
    ):
        if teachers:
            number, resources = section.num_servers * len(teachers), _server_resources(section, teachers[0])
            each = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
            smaller = {"GPU": "teachers.gpus_per_actor"}
            found.append(
                ResourceRequest(
                    f"{number} {kind}", number, each, section.node_labels, "teachers.num_servers", smaller, instead
                )
            )
    return found


def _server_resources(section: TeachersSection, teacher: TeacherSection) -> dict[str, float]:
    from distcse.teachers.factory import uses_table

    gpus = section.gpus_per_actor or 0.0
    if not uses_table(section, teacher):
        return {"num_cpus": 1.0, "num_gpus": gpus}
    return {"num_cpus": 0.0, "num_gpus": gpus if teacher.similarity == "rank" else 0.0}


def _run_token() -> str:
    """Part of an actor's name: two runs on one cluster must not meet."""
    return str(ray.get_runtime_context().get_job_id())


def use_assigned_gpus() -> None:
    """In an actor, before it meets a device: no GPU where it was given none. Ray leaves it the sight of all of its node."""
    if not ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def use_assigned_threads() -> None:
    """As many threads of PyTorch, where this actor has any, as CPUs that Ray gave it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))))
