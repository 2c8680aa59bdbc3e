"""Ray actors that embed a corpus and write its embedding table."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from distcse.data import Corpus
from distcse.errors import StoppedEarlyError, TeacherServerError
from distcse.events import LogMessage
from distcse.experiments.backend import EmbeddingRequest
from distcse.placement.resources import count_fitting, format_resources, nodes_with, refuse_impossible
from distcse.placement.waiting import WaitWarning
from distcse.ray_backend.assigned_resources import use_assigned_gpus, use_assigned_threads
from distcse.ray_backend.heartbeat import RESTARTABLE, HeartbeatActor
from distcse.ray_backend.nodes import STOPPED_WAIT_S, ResourceWatchdog, alive
from distcse.ray_backend.teacher_servers import cause_of, monitor_heartbeats
from distcse.recipe import TeacherSection
from distcse.storage import ArtifactStore, open_store
from distcse.teachers import embedding
from distcse.teachers.kinds import kind_of
from distcse.teachers.resources import EMBEDDING, plan_embedding, request_embedding_actors
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.teacher import Embedder

_POLL_S = 1.0
_MAX_TASK_SHARDS, _MIN_TASKS = 8, 4
"""Most shards of a GPU actor's task, and fewest tasks per actor, so that all actors end at about the same time."""


class EmbeddingActor(HeartbeatActor):
    """Embeds shards of one table and writes them to storage itself, so that no vector crosses Ray's network."""

    def __init__(
        self,
        teacher: TeacherSection,
        corpus: ArtifactStore,
        table: ArtifactStore,
        identity: TableIdentity,
        tokens_per_batch: int | None,
    ) -> None:
        use_assigned_gpus()
        use_assigned_threads()
        self._teacher = teacher
        self._corpus = Corpus.open(corpus.path)
        self._table = EmbeddingTable(table.path, identity)
        self._tokens_per_batch = tokens_per_batch

    @cached_property
    def _encoder(self) -> Embedder:
        # Not in the constructor: loading can hang too, and an actor has no heartbeat before its constructor returns.
        return kind_of(self._teacher).open_embedder()

    def embed(self, shards: Sequence[int]) -> int:
        """Embed shards, except those that this task stored before it was interrupted; return their number of rows."""
        missing = [shard for shard in shards if not self._table.is_intact(shard)]
        done = embedding.embed_shards(self._encoder, self._corpus, self._table, missing, self._tokens_per_batch)
        return sum(done) + sum(len(self._table.shard_range(shard)) for shard in set(shards).difference(missing))


def embedding_tasks(missing: Sequence[int], actors: int, is_on_gpu: bool) -> list[Sequence[int]]:
    """Split missing shards into the actors' tasks.

    A task on a CPU is one shard. An actor on a GPU stores a shard and tokenizes the next but one while its GPU computes, which
    only shards of one task can.
    """
    size = max(1, min(_MAX_TASK_SHARDS, len(missing) // (_MIN_TASKS * actors))) if is_on_gpu else 1
    return [missing[begin : begin + size] for begin in range(0, len(missing), size)]


def embed_shards(request: EmbeddingRequest) -> None:
    """Embed the missing shards of a table with a pool of actors, and restart actors that hang.

    Raises:
        StoppedEarlyError: A stop was requested while no actor had started. An embedding pass that runs is completed.
        TeacherServerError: An actor failed, or crashed repeatedly.
        ClusterTooSmallError: The cluster cannot run the actors, or lost a node and got no other.
        NodeLabelError: No node has the labels of `teachers.node_labels`.
        TeacherOutputError: The teacher outputs a vector that is zero or not finite.
    """
    teacher, section, table, reporter = request.teacher, request.section, request.table, request.reporter
    nodes = alive()
    usable = nodes_with(nodes, section.node_labels, "teachers.node_labels")
    most = len(request.missing)
    each = {"CPU": 1.0, "GPU": plan_embedding(section, nodes, request.gpu_mode, [teacher], most).of(EMBEDDING)}
    count = min(most, section.embedding_workers or most, max(1, count_fitting(usable, each)))
    refuse_impossible([request_embedding_actors(section, count, each)], nodes)
    if count < min(most, section.embedding_workers or 1):
        text = f"teacher {teacher.backbone}: {count} of {section.embedding_workers} embedding actors, as many as fit"
        reporter.emit(LogMessage(text, warning=True))
    actor_class = ray.remote(num_cpus=each["CPU"], num_gpus=each["GPU"], **RESTARTABLE)(EmbeddingActor)
    corpus = open_store(request.corpus.directory)
    actors = [
        actor_class.options(
            name=f"embedding-{table.identity.key[:8]}-{number}", get_if_exists=False, label_selector=section.node_labels
        ).remote(teacher, corpus, table.store, table.identity, section.tokens_per_batch)
        for number in range(count)
    ]
    watchdog = ResourceWatchdog(
        [request_embedding_actors(section, 1, each)], lambda text: reporter.emit(LogMessage(text, warning=True))
    )
    starting, waiting_warning = {actor.beat.remote(): actor for actor in actors}, WaitWarning(reporter)
    waiting = deque(embedding_tasks(request.missing, count, is_on_gpu=each["GPU"] > 0))
    running: dict[Any, Any] = {}
    done = 0
    try:
        with monitor_heartbeats(section, reporter) as monitor:
            for number, actor in enumerate(actors):
                monitor.add(f"embedding actor {number} of teacher {teacher.backbone}", actor)
            while waiting or running:
                if len(starting) == count:
                    if reporter.stop_requested() and waiting_warning.waited_s > STOPPED_WAIT_S:
                        raise StoppedEarlyError(
                            f"stopped while teacher {teacher.backbone} waited for resources; start the run again"
                        )
                    waiting_warning.check(
                        f"teacher {teacher.backbone} waits for a node with {format_resources(each)} free"
                    )
                watchdog.check()
                for answer in ray.wait([*starting, *running], timeout=_POLL_S)[0]:
                    if answer in running:
                        actor = running.pop(answer)
                        done += ray.get(answer)
                        request.on_rows(done)
                    else:
                        actor = starting.pop(answer)
                    # An actor that waits for resources gets no task: the task would wait with it, maybe forever.
                    if waiting:
                        shards = waiting.popleft()
                        running[actor.embed.options(name=_task_name(shards)).remote(shards)] = actor
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


def _task_name(shards: Sequence[int]) -> str:
    return f"embed shard {shards[0]}" if len(shards) == 1 else f"embed shards {shards[0]} to {shards[-1]}"
