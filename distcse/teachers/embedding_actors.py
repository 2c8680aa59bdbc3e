"""Ray actors that embed a corpus and fill its table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import ActorPool

from distcse.data import Corpus
from distcse.errors import StoppedEarlyError, TeacherServerError
from distcse.events import LogMessage, Reporter
from distcse.ray_backend.nodes import (
    STOPPED_WAIT_S,
    ResourceRequest,
    Resources,
    ResourceWatchdog,
    alive,
    fitting,
    nodes_with,
    refuse_impossible,
)
from distcse.recipe import TeacherSection, TeachersSection
from distcse.teachers.embedding import embed_shard
from distcse.teachers.factory import open_embedder
from distcse.teachers.heartbeat import RESTARTABLE, HeartbeatActor
from distcse.teachers.servers import cause_of, guarded, use_assigned_gpus, use_assigned_threads
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.teacher import Embedder

_LOOK = 1.0


class EmbeddingActor(HeartbeatActor):
    """Embeds shards of one table and writes them to the table's storage itself: vectors never cross the network."""

    def __init__(
        self, teacher: TeacherSection, corpus: Path, table: Path, identity: TableIdentity, tokens_per_batch: int
    ) -> None:
        use_assigned_gpus()
        use_assigned_threads()
        self._teacher = teacher
        self._corpus = Corpus.open(corpus)
        self._table = EmbeddingTable(table, identity)
        self._tokens_per_batch = tokens_per_batch

    @cached_property
    def _encoder(self) -> Embedder:
        # Not in the constructor: loading can hang too, and before it ends there is no pulse to feel.
        return open_embedder(self._teacher)

    def embed(self, shard: int) -> int:
        """Rows embedded."""
        return embed_shard(self._encoder, self._teacher, self._corpus, self._table, shard, self._tokens_per_batch)


def embed_shards(
    teacher: TeacherSection,
    section: TeachersSection,
    corpus: Corpus,
    table: EmbeddingTable,
    missing: Sequence[int],
    on_rows: Callable[[int], None],
    reporter: Reporter,
) -> None:
    """Embed the missing shards of a table by a pool of actors; `on_rows` is told the rows done as shards come in.

    Raises:
        StoppedEarlyError: A stop was requested, and no builder has room. A running pass ends first.
    """
    nodes = nodes_with(section.node_labels, "teachers.node_labels")
    each = embedding_actor_resources(section, nodes)
    count = min(len(missing), section.embedding_workers or max(1, fitting(nodes, each)))
    refuse_impossible([_builders(section, count, each)], alive())
    actor = ray.remote(num_cpus=each["CPU"], num_gpus=each["GPU"], **RESTARTABLE)(EmbeddingActor)
    builders = [
        actor.options(
            name=f"builder-{table.identity.key[:8]}-{number}", get_if_exists=False, label_selector=section.node_labels
        ).remote(teacher, corpus.directory, table.directory, table.identity, section.tokens_per_batch)
        for number in range(count)
    ]
    patience = ResourceWatchdog(
        [_builders(section, 1, each)], lambda told: reporter.emit(LogMessage(told, warning=True))
    )
    heartbeats, late = [builder.beat.remote() for builder in builders], time.monotonic() + STOPPED_WAIT_S
    pool, done = ActorPool(builders), 0
    for shard in missing:
        pool.submit(lambda builder, shard: builder.embed.options(name=f"embed shard {shard}").remote(shard), shard)
    try:
        with guarded(section, reporter) as guard:
            for number, builder in enumerate(builders):
                guard.add(f"builder {number} of teacher {teacher.backbone}", builder)
            while pool.has_next():
                if reporter.stop_requested() and time.monotonic() > late and not ray.wait(heartbeats, timeout=0)[0]:
                    raise StoppedEarlyError(f"stopped while teacher {teacher.backbone} waited for room; start it again")
                patience.look()
                try:
                    done += pool.get_next_unordered(timeout=_LOOK)
                except TimeoutError:
                    continue
                on_rows(done)
    except RayTaskError as failed:
        raise cause_of(teacher, failed) from failed
    except RayActorError as lost:
        raise TeacherServerError(
            f"teacher {teacher.backbone} was started again and again and lost its process each time: "
            f"{str(lost).strip().splitlines()[0]}. Lower teachers.tokens_per_batch or teachers.embedding_workers; whole shards "
            "are kept"
        ) from lost
    finally:
        for builder in builders:
            ray.kill(builder)


def embedding_actor_resources(section: TeachersSection, nodes: Sequence[Resources]) -> dict[str, float]:
    """What an embedding actor takes: a CPU, and a GPU where the recipe or, it saying nothing, one of the nodes has one."""
    has_one = any(node.get("GPU", 0.0) >= 1 for node in nodes)
    return {"CPU": 1.0, "GPU": float(has_one) if section.gpus_per_actor is None else section.gpus_per_actor}


def _builders(section: TeachersSection, count: int, each: Resources) -> ResourceRequest:
    told, smaller = f"teachers.embedding_workers={count}", {"GPU": "teachers.gpus_per_actor"}
    return ResourceRequest(told, count, each, section.node_labels, "teachers.embedding_workers", smaller)
