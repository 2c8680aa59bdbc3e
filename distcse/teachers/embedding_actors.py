"""Ray actors that embed a corpus and write its embedding table."""

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
    count_fitting,
    nodes_with,
    refuse_impossible,
)
from distcse.recipe import TeacherSection, TeachersSection
from distcse.teachers.embedding import embed_shard
from distcse.teachers.factory import open_embedder
from distcse.teachers.heartbeat import RESTARTABLE, HeartbeatActor
from distcse.teachers.servers import cause_of, monitor_heartbeats, use_assigned_gpus, use_assigned_threads
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.teacher import Embedder

_POLL_S = 1.0


class EmbeddingActor(HeartbeatActor):
    """Embeds shards of one table and writes them to storage itself, so that no vector crosses Ray's network."""

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
        # Not in the constructor: loading can hang too, and an actor has no heartbeat before its constructor returns.
        return open_embedder(self._teacher)

    def embed(self, shard: int) -> int:
        """Embed one shard and return its number of rows."""
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
    """Embed the missing shards of a table with a pool of actors, and restart actors that hang.

    Args:
        teacher: The teacher that embeds.
        section: Number, resources and node labels of the actors.
        corpus: The corpus to embed.
        table: The table to complete.
        missing: Indices of the shards to embed.
        on_rows: Called after each shard with the number of rows embedded so far.
        reporter: Receives warnings, and answers whether a stop was requested.

    Raises:
        StoppedEarlyError: A stop was requested while no actor had started. An embedding pass that runs is completed.
        TeacherServerError: An actor failed, or crashed repeatedly.
        ClusterTooSmallError: The cluster cannot run the actors, or lost a node and got no other.
        NodeLabelError: No node has the labels of `teachers.node_labels`.
        TeacherOutputError: The teacher outputs a vector that is zero or not finite.
    """
    nodes = nodes_with(section.node_labels, "teachers.node_labels")
    each = embedding_actor_resources(section, nodes)
    count = min(len(missing), section.embedding_workers or max(1, count_fitting(nodes, each)))
    refuse_impossible([_request_actors(section, count, each)], alive())
    actor_class = ray.remote(num_cpus=each["CPU"], num_gpus=each["GPU"], **RESTARTABLE)(EmbeddingActor)
    actors = [
        actor_class.options(
            name=f"builder-{table.identity.key[:8]}-{number}", get_if_exists=False, label_selector=section.node_labels
        ).remote(teacher, corpus.directory, table.directory, table.identity, section.tokens_per_batch)
        for number in range(count)
    ]
    watchdog = ResourceWatchdog(
        [_request_actors(section, 1, each)], lambda text: reporter.emit(LogMessage(text, warning=True))
    )
    heartbeats, stop_after = [actor.beat.remote() for actor in actors], time.monotonic() + STOPPED_WAIT_S
    pool, done = ActorPool(actors), 0
    for shard in missing:
        pool.submit(lambda actor, shard: actor.embed.options(name=f"embed shard {shard}").remote(shard), shard)
    try:
        with monitor_heartbeats(section, reporter) as monitor:
            for number, actor in enumerate(actors):
                monitor.add(f"embedding actor {number} of teacher {teacher.backbone}", actor)
            while pool.has_next():
                if (
                    reporter.stop_requested()
                    and time.monotonic() > stop_after
                    and not ray.wait(heartbeats, timeout=0)[0]
                ):
                    raise StoppedEarlyError(
                        f"stopped while teacher {teacher.backbone} waited for resources; start the run again"
                    )
                watchdog.check()
                try:
                    done += pool.get_next_unordered(timeout=_POLL_S)
                except TimeoutError:
                    continue
                on_rows(done)
    except RayTaskError as failed:
        raise cause_of(teacher, failed) from failed
    except RayActorError as lost:
        raise TeacherServerError(
            f"teacher {teacher.backbone}: an embedding actor crashed repeatedly; last error: "
            f"{str(lost).strip().splitlines()[0]}. Lower teachers.tokens_per_batch or teachers.embedding_workers; "
            "complete shards are kept"
        ) from lost
    finally:
        for actor in actors:
            ray.kill(actor)


def embedding_actor_resources(section: TeachersSection, nodes: Sequence[Resources]) -> dict[str, float]:
    """Return an embedding actor's resources: 1 CPU, and `gpus_per_actor` GPUs; if that is null, 1 GPU if a node has one."""
    has_gpu = any(node.get("GPU", 0.0) >= 1 for node in nodes)
    return {"CPU": 1.0, "GPU": float(has_gpu) if section.gpus_per_actor is None else section.gpus_per_actor}


def _request_actors(section: TeachersSection, count: int, each: Resources) -> ResourceRequest:
    description, resource_keys = f"teachers.embedding_workers={count}", {"GPU": "teachers.gpus_per_actor"}
    return ResourceRequest(description, count, each, section.node_labels, "teachers.embedding_workers", resource_keys)
