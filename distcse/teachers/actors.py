"""Ray actors that host frozen teachers: builders that fill a table, servers that answer workers.

The only file of this folder that imports Ray. Between worker and server go row ids one way and lists the other way:
never vectors, tokens or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import ActorPool
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distcse.corpus import Corpus
from distcse.errors import DistcseError, TeacherError
from distcse.nodes import Demand, alive, fitting, nodes_with, refuse_impossible
from distcse.recipe import TeacherSection, TeachersSection
from distcse.teachers.build import embed_shard
from distcse.teachers.opening import live, open_embedder, serving, uses_table
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.teacher import Teacher

_OUTLIVES = {"max_restarts": 20, "max_task_retries": 3}
"""An actor comes back after its process or node was lost. Not without end: what kills it every time is told at last."""


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


class Servers:
    """The server actors of a run, each started beside the worker that first asks for it; itself an actor, and they end with it.

    Beside is wished for, not insisted on: where the worker's node has no room, or has other labels than `teachers.nodes`, a
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

    def beside(self, rank: int, node: str) -> dict[int, Any]:
        """For each teacher, by its number, the server that worker `rank`, on a node of this id, shall ask."""
        copy = rank % self._section.servers
        for number, (make, resources) in self._makes.items():
            if (number, copy) not in self._running:
                server = ray.remote(**resources, **_OUTLIVES)(TeacherServer).options(
                    name=f"teacher-{number}-{copy}-{self._job}",
                    **_near(node, self._section.nodes, takes_room=any(resources.values())),
                )
                self._running[number, copy] = server.remote(make)
        return {number: self._running[number, copy] for number in self._makes}


def _near(node: str, labels: dict[str, str] | None, takes_room: bool) -> dict[str, Any]:
    """Ray's options for an actor near a node, among the nodes of some labels; elsewhere where it takes room and there is none."""
    has = next(there["Labels"] for there in ray.nodes() if there["NodeID"] == node)
    if labels and not labels.items() <= has.items():
        return {"label_selector": labels}
    # A node that is full may stay so: its own workers fill it. Ray's switch for spilling is private, and there is no other.
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=takes_room)}


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
) -> None:
    """Embed the missing shards of a table by a pool of actors; `on_rows` is told the rows done as shards come in."""
    builder = {"CPU": 1.0, "GPU": section.builder_gpus}
    fit = fitting(nodes_with(section.nodes, "teachers.nodes"), builder)
    number = min(len(missing), section.builders or max(1, fit))
    told, smaller = f"teachers.builders={number}", {"GPU": "teachers.builder_gpus"}
    refuse_impossible([Demand(told, number, builder, section.nodes, "teachers.builders", smaller)], alive())
    actor = ray.remote(num_cpus=1, num_gpus=section.builder_gpus, **_OUTLIVES)(ShardBuilder)
    builders = [
        actor.options(
            name=f"builder-{table.identity.key[:8]}-{number}", get_if_exists=False, label_selector=section.nodes
        ).remote(teacher, corpus.directory, table.directory, table.identity, section.tokens_per_batch)
        for number in range(number)
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


def open_servers(
    section: TeachersSection,
    corpus: Corpus,
    tables: Sequence[EmbeddingTable | None],
    seed: int,
    served: Sequence[int] | None = None,
) -> Any:
    """The `Servers` of a run; `ray.kill` ends them all.

    Args:
        section: The teachers.
        corpus: What they are asked about.
        tables: The table of each; one that has none answers live.
        seed: Of the run.
        served: Numbers of the teachers that have servers; None are all.
    """
    makes: dict[int, tuple[Callable[[], Teacher], dict[str, float]]] = {}
    for number in range(len(tables)) if served is None else served:
        teacher, table = section.encoders[number], tables[number]
        makes[number] = (
            (_table_teacher(teacher, table, seed), {"num_cpus": 0.0})
            if table is not None
            else (_live_teacher(teacher, corpus.directory, section.tokens_per_batch), _live_resources(section))
        )
    job = _run_token()
    # On the driver's node: with no other it shall be lost, as its servers end with it.
    home = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    servers = ray.remote(num_cpus=0)(Servers).options(name=f"servers-{job}", scheduling_strategy=home)
    return servers.remote(makes, section, job)


def servers_beside(servers: Any, section: TeachersSection, rank: int) -> dict[int, Any]:
    """In a worker: the server that it shall ask, loaded, by the teacher's number. A teacher's mistake comes as it is."""
    node = ray.get_runtime_context().get_node_id()
    mine: dict[int, Any] = ray.get(servers.beside.remote(rank, node))
    for number, server in mine.items():
        teacher = section.encoders[number]
        try:
            ray.get(server.ready.remote())
        except RayActorError as lost:
            cause = getattr(lost, "cause", None) or lost.__cause__
            if cause is None:  # its process was lost, and may not be the next time
                raise
            if isinstance(cause, DistcseError):
                raise cause from lost
            told = str(lost).strip().splitlines()[-1]
            raise TeacherError(f"teacher {teacher.backbone} cannot be served: {told}") from lost
    return mine


def _told(teacher: TeacherSection, failed: RayTaskError) -> TeacherError:
    return TeacherError(f"teacher {teacher.backbone} failed: {str(failed).strip().splitlines()[-1]}")


def _table_teacher(teacher: TeacherSection, table: EmbeddingTable, seed: int) -> Callable[[], Teacher]:
    directory, identity = table.directory, table.identity
    return lambda: serving(teacher, EmbeddingTable(directory, identity), seed)


def _live_teacher(teacher: TeacherSection, corpus: Path, tokens_per_batch: int) -> Callable[[], Teacher]:
    return lambda: live(teacher, Corpus.open(corpus), tokens_per_batch)


def live_demands(section: TeachersSection) -> list[Demand]:
    """What the servers of live teachers take; those of tables take nothing."""
    number = section.servers * sum(not uses_table(section, teacher) for teacher in section.encoders)
    resources = _live_resources(section)
    each = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
    told, smaller, instead = (
        f"{number} live teacher servers",
        {"GPU": "teachers.builder_gpus"},
        "use teachers.mode=table",
    )
    return [Demand(told, number, each, section.nodes, "teachers.servers", smaller, instead)] if number else []


def _live_resources(section: TeachersSection) -> dict[str, float]:
    return {"num_cpus": 1.0, "num_gpus": section.builder_gpus}


def _run_token() -> str:
    """Part of an actor's name: two runs on one cluster must not meet."""
    return str(ray.get_runtime_context().get_job_id())


def use_assigned_threads() -> None:
    """As many threads as CPUs that Ray gave this actor."""
    torch.set_num_threads(max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))))
