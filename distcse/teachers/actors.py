"""Ray actors that host frozen teachers: builders that fill a table, servers that answer workers.

The only file of this folder that imports Ray. Between worker and server go row ids one way and lists the other way:
never vectors, tokens or weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import ActorPool

from distcse.corpus import Corpus
from distcse.errors import DistcseError, TeacherError
from distcse.nodes import resources_on
from distcse.recipe import TeacherSection, TeachersSection
from distcse.teachers.build import embed_shard
from distcse.teachers.opening import live, open_embedder, serving
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.teacher import Teacher

_OUTLIVES = {"max_restarts": 20, "max_task_retries": 3}
"""An actor comes back after its process or node was lost. Not without end: what kills it every time is told at last."""
_UNDER_WAY = 2
"""Questions of one worker that a server has at a time: the block that is wanted next, and the one after it."""


class ShardBuilder:
    """Embeds shards of one table and writes them to the table's storage itself: vectors never cross the network."""

    def __init__(
        self, teacher: TeacherSection, corpus: Path, table: Path, identity: TableIdentity, tokens_per_batch: int
    ) -> None:
        use_assigned_threads()
        self._teacher = teacher
        self._encoder = open_embedder(teacher)
        self._corpus = Corpus.open(corpus)
        self._table = EmbeddingTable(table, identity)
        self._tokens_per_batch = tokens_per_batch

    def build(self, shard: int) -> int:
        """Rows embedded."""
        return embed_shard(self._encoder, self._teacher, self._corpus, self._table, shard, self._tokens_per_batch)


class TeacherServer:
    """Hosts one teacher and serves its lists."""

    def __init__(self, make_teacher: Callable[[], Teacher]) -> None:
        use_assigned_threads()
        self._teacher = make_teacher()

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """See `Teacher.similarities`."""
        return self._teacher.similarities(columns, rows)

    def ready(self) -> bool:
        """Answers once the teacher is loaded."""
        return True


class RemoteSource:
    """A teacher behind a server actor, as a worker's `ListSource`. Calls outlive the server: Ray restarts and retries.

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


def server_of(pool: Sequence[Any], run: str, worker: int) -> Any:
    """The server of a pool that a worker asks. A run's workers take turns; where they begin is drawn by the run's name, so
    that trials of one worker share a pool too."""
    return pool[(zlib.crc32(run.encode()) + worker) % len(pool)]


def build_shards(
    teacher: TeacherSection,
    section: TeachersSection,
    corpus: Corpus,
    table: EmbeddingTable,
    missing: Sequence[int],
    on_rows: Callable[[int], None],
) -> None:
    """Embed the missing shards of a table by a pool of actors; `on_rows` is told the rows done as shards come in."""
    actor = ray.remote(num_cpus=1, num_gpus=section.builder_gpus, **_OUTLIVES)(ShardBuilder)
    builders = [
        actor.options(
            name=f"builder-{table.identity.key[:8]}-{number}", get_if_exists=False, label_selector=section.nodes
        ).remote(teacher, corpus.directory, table.directory, table.identity, section.tokens_per_batch)
        for number in range(min(len(missing), section.builders or _fitting_builders(section)))
    ]
    done = 0
    try:
        for rows in ActorPool(builders).map_unordered(
            lambda builder, shard: builder.build.options(name=f"embed shard {shard}").remote(shard), list(missing)
        ):
            done += rows
            on_rows(done)
    except RayTaskError as failed:
        raise (failed.cause if isinstance(failed.cause, DistcseError) else _told(teacher, failed)) from failed
    except RayActorError as lost:
        raise TeacherError(
            f"teacher {teacher.backbone} was started again and again and lost its process each time: "
            f"{str(lost).strip().splitlines()[0]}. Lower teachers.tokens_per_batch or teachers.builders; whole shards "
            "are kept"
        ) from lost
    finally:
        for builder in builders:
            ray.kill(builder)


def start_servers(
    number: int,
    teacher: TeacherSection,
    section: TeachersSection,
    corpus: Corpus,
    table: EmbeddingTable | None,
    seed: int,
) -> list[Any]:
    """Server actors of one teacher, loaded and ready. Serving a table takes no CPU of its own worth reserving."""
    if table is not None:
        make, resources = _table_teacher(teacher, table, seed), {"num_cpus": 0.0}
    else:
        make = _live_teacher(teacher, corpus.directory, section.tokens_per_batch)
        resources = {"num_cpus": 1.0, "num_gpus": section.builder_gpus}
    actor = ray.remote(**resources, **_OUTLIVES)(TeacherServer)
    servers = [
        actor.options(name=f"teacher-{number}-{copy}-{_run_token()}", label_selector=section.nodes).remote(make)
        for copy in range(section.servers)
    ]
    try:
        ray.get([server.ready.remote() for server in servers])
    except RayActorError as lost:  # also where its constructor raised
        cause = getattr(lost, "cause", None) or lost.__cause__
        told = str(lost).strip().splitlines()[-1]
        raise (
            cause
            if isinstance(cause, DistcseError)
            else TeacherError(f"teacher {teacher.backbone} cannot be served: {told}")
        ) from lost
    return servers


def _told(teacher: TeacherSection, failed: RayTaskError) -> TeacherError:
    return TeacherError(f"teacher {teacher.backbone} failed: {str(failed).strip().splitlines()[-1]}")


def _table_teacher(teacher: TeacherSection, table: EmbeddingTable, seed: int) -> Callable[[], Teacher]:
    directory, identity = table.directory, table.identity
    return lambda: serving(teacher, EmbeddingTable(directory, identity), seed)


def _live_teacher(teacher: TeacherSection, corpus: Path, tokens_per_batch: int) -> Callable[[], Teacher]:
    return lambda: live(teacher, Corpus.open(corpus), tokens_per_batch)


def _fitting_builders(section: TeachersSection) -> int:
    there = resources_on(section.nodes, "teachers.nodes")
    if section.builder_gpus:
        return max(1, int(there.get("GPU", 0) / section.builder_gpus))
    return max(1, int(there.get("CPU", 1)))


def _run_token() -> str:
    """Part of an actor's name: two runs on one cluster must not meet."""
    return str(ray.get_runtime_context().get_job_id())


def use_assigned_threads() -> None:
    """As many threads as CPUs that Ray gave this actor."""
    torch.set_num_threads(max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))))
