"""Ray actors that host frozen teachers: builders that fill a table, servers that answer workers.

This file and `pulse.py` are the only ones of this folder that import Ray. Between worker and server go row ids one way and
lists the other way: never vectors, tokens or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import ActorPool

from distcse.corpus import Corpus
from distcse.errors import DistcseError, TeacherError
from distcse.events import Note, Watch
from distcse.nodes import Need, Patience, resources_on
from distcse.recipe import TeacherSection, TeachersSection
from distcse.teachers.build import embed_shard
from distcse.teachers.opening import live, open_embedder, serving
from distcse.teachers.pulse import CONCURRENCY, Guard, Pulse
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.teacher import Embedder, Teacher

_OUTLIVES = {"max_restarts": 20, "max_task_retries": 3, **CONCURRENCY}
"""An actor comes back after its process or node was lost. Not without end: what kills it every time is told at last."""
_LOOK = 1.0


class ShardBuilder(Pulse):
    """Embeds shards of one table and writes them to the table's storage itself: vectors never cross the network."""

    def __init__(
        self, teacher: TeacherSection, corpus: Path, table: Path, identity: TableIdentity, tokens_per_batch: int
    ) -> None:
        use_assigned_threads()
        self._teacher = teacher
        self._corpus = Corpus.open(corpus)
        self._table = EmbeddingTable(table, identity)
        self._tokens_per_batch = tokens_per_batch

    @cached_property
    def _encoder(self) -> Embedder:
        # Not in the constructor: loading can hang too, and before it ends there is no pulse to feel.
        return open_embedder(self._teacher)

    def build(self, shard: int) -> int:
        """Rows embedded."""
        return embed_shard(self._encoder, self._teacher, self._corpus, self._table, shard, self._tokens_per_batch)


class TeacherServer(Pulse):
    """Hosts one teacher and serves its lists."""

    def __init__(self, make_teacher: Callable[[], Teacher]) -> None:
        use_assigned_threads()
        self._make_teacher = make_teacher

    @cached_property
    def _teacher(self) -> Teacher:
        return self._make_teacher()

    def similarities(self, columns: NDArray[np.int64], rows: slice) -> NDArray[np.float32]:
        """See `Teacher.similarities`."""
        return self._teacher.similarities(columns, rows)

    def ready(self) -> bool:
        """Answers once the teacher is loaded."""
        return self._teacher is not None


class RemoteSource:
    """A teacher behind a server actor, as a worker's `ListSource`. Calls outlive the server: Ray restarts and retries.

    Args:
        server: A `TeacherServer` actor.
        asked: Told of every question, by its answer to come.
    """

    def __init__(self, server: Any, asked: Callable[[Future[NDArray[np.float32]]], None]) -> None:
        self._server = server
        self._asked = asked

    def request(self, columns: NDArray[np.int64], rows: slice) -> Future[NDArray[np.float32]]:
        answer: Future[NDArray[np.float32]] = self._server.similarities.remote(columns, rows).future()
        self._asked(answer)
        return answer


def build_shards(
    teacher: TeacherSection,
    section: TeachersSection,
    corpus: Corpus,
    table: EmbeddingTable,
    missing: Sequence[int],
    on_rows: Callable[[int], None],
    watch: Watch,
) -> None:
    """Embed the missing shards of a table by a pool of actors; `on_rows` is told the rows done as shards come in."""
    resources = {"num_cpus": 1.0, "num_gpus": section.builder_gpus}
    actor = ray.remote(**resources, **_OUTLIVES)(ShardBuilder)
    builders = [
        actor.options(
            name=f"builder-{table.identity.key[:8]}-{number}", get_if_exists=False, label_selector=section.nodes
        ).remote(teacher, corpus.directory, table.directory, table.identity, section.tokens_per_batch)
        for number in range(min(len(missing), section.builders or _fitting_builders(section)))
    ]
    patience = _patience("builders of tables", 1, resources, section, watch)
    pool, done = ActorPool(builders), 0
    for shard in missing:
        pool.submit(lambda builder, shard: builder.build.options(name=f"embed shard {shard}").remote(shard), shard)
    try:
        with _guarded(section, watch) as guard:
            for number, builder in enumerate(builders):
                guard.add(f"builder {number} of teacher {teacher.backbone}", builder)
            while pool.has_next():
                patience.look()
                try:
                    done += pool.get_next_unordered(timeout=_LOOK)
                except TimeoutError:
                    continue
                on_rows(done)
    except RayTaskError as failed:
        raise _cause_of(teacher, failed) from failed
    except RayActorError as lost:
        raise TeacherError(
            f"teacher {teacher.backbone} was started again and again and lost its process each time: "
            f"{str(lost).strip().splitlines()[0]}. Lower teachers.tokens_per_batch or teachers.builders; whole shards "
            "are kept"
        ) from lost
    finally:
        for builder in builders:
            ray.kill(builder)


@contextmanager
def served(
    section: TeachersSection,
    corpus: Corpus,
    tables: Sequence[EmbeddingTable | None],
    seed: int,
    watch: Watch,
    but: Collection[int] = (),
) -> Iterator[list[list[Any]]]:
    """For each teacher its server actors, loaded and ready, for as long as this is entered; one that hangs is replaced.

    Args:
        section: The teachers.
        corpus: Their sentences.
        tables: The teachers' tables; None for one that answers live.
        seed: The recipe's.
        watch: Told of what hangs and of nodes that are lost.
        but: Teachers that nobody will ask; they get no server.
    """
    pools: list[list[Any]] = []
    try:
        with _guarded(section, watch) as guard:
            for number, (teacher, table) in enumerate(zip(section.encoders, tables, strict=True)):
                copies = 0 if number in but else section.servers
                pools.append(_start_servers(number, teacher, section, corpus, table, seed, copies))
                for copy, server in enumerate(pools[-1]):
                    guard.add(f"server {copy} of teacher {number}, {teacher.backbone}", server)
            for teacher, pool in zip(section.encoders, pools, strict=True):
                _wait_until_ready(teacher, pool, _patience("servers of lists", 1, {}, section, watch))
            yield pools
    finally:
        for server in (server for pool in pools for server in pool):
            ray.kill(server)


def _start_servers(
    number: int,
    teacher: TeacherSection,
    section: TeachersSection,
    corpus: Corpus,
    table: EmbeddingTable | None,
    seed: int,
    copies: int,
) -> list[Any]:
    """Server actors of one teacher. Serving a table takes no CPU of its own worth reserving."""
    if table is not None:
        make, resources = _table_teacher(teacher, table, seed), {"num_cpus": 0.0}
    else:
        make = _live_teacher(teacher, corpus.directory, section.tokens_per_batch)
        resources = {"num_cpus": 1.0, "num_gpus": section.builder_gpus}
    actor = ray.remote(**resources, **_OUTLIVES)(TeacherServer)
    return [
        actor.options(name=f"teacher-{number}-{copy}-{_run_token()}", label_selector=section.nodes).remote(make)
        for copy in range(copies)
    ]


def _wait_until_ready(teacher: TeacherSection, servers: Sequence[Any], patience: Patience) -> None:
    waiting = [server.ready.remote() for server in servers]
    try:
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_LOOK)
            ray.get(done)
            patience.look()
    except RayTaskError as failed:
        raise _cause_of(teacher, failed) from failed
    except RayActorError as lost:
        told = str(lost).strip().splitlines()[-1]
        raise TeacherError(f"teacher {teacher.backbone} cannot be served: {told}") from lost


def _guarded(section: TeachersSection, watch: Watch) -> Guard:
    return Guard(section.deadline, lambda told: watch.post(Note(told, warning=True)))


def _patience(
    what: str, number: int, resources: Mapping[str, float], section: TeachersSection, watch: Watch
) -> Patience:
    kinds = {"num_cpus": "CPU", "num_gpus": "GPU"}
    each = {kinds[name]: amount for name, amount in resources.items()}
    return Patience([Need(what, number, each, section.nodes)], lambda told: watch.post(Note(told, warning=True)))


def _cause_of(teacher: TeacherSection, failed: RayTaskError) -> DistcseError:
    """A mistake of the user's as it is; anything else with the teacher's name."""
    return failed.cause if isinstance(failed.cause, DistcseError) else _told(teacher, failed)


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
