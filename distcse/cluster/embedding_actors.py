"""Ray actors that embed a corpus and write its embedding table."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from distcse.cluster.assigned_resources import use_assigned
from distcse.cluster.heartbeat import RESTARTABLE, HeartbeatActor, HeartbeatMonitor
from distcse.cluster.nodes import ResourceWatchdog, alive
from distcse.cluster.teacher_servers import cause_of
from distcse.devices.resources import Resources, count_fitting, format_resources, nodes_with, refuse_impossible
from distcse.errors import TeacherServerError, first_line
from distcse.events import WaitWarning
from distcse.recipe import TeacherSection
from distcse.runs.backend import EmbeddingRequest
from distcse.storage import ArtifactStore
from distcse.teachers import embedding
from distcse.teachers.kinds import kind_of
from distcse.teachers.resources import EMBEDDING, embedding_actors, plan_embedding
from distcse.teachers.reuse import Reuse
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import Embedder
from distcse.text import Corpus

_POLL_S = 1.0
_MAX_TASK_LOSSES = 3
"""Times that a task may lose its actor. More often, the task is the reason."""
_MAX_TASK_SHARDS, _MIN_TASKS = 8, 4
"""Most shards of a GPU actor's task, and fewest tasks per actor, so that all actors end at about the same time."""


class EmbeddingActor(HeartbeatActor):
    """Embeds shards of one table and writes them to storage itself, so that no vector crosses Ray's network."""

    def __init__(
        self,
        teacher: TeacherSection,
        corpus: ArtifactStore,
        table: EmbeddingTable,
        tokens_per_batch: int | None,
        reuse: Reuse | None = None,
    ) -> None:
        use_assigned()
        self._teacher = teacher
        self._corpus = Corpus.open(corpus)
        self._table = table
        self._tokens_per_batch = tokens_per_batch
        self._reuse = reuse
        self._embedded = 0

    @cached_property
    def _encoder(self) -> Embedder:
        # Not in the constructor: loading can hang too, and an actor has no heartbeat before its constructor returns.
        return kind_of(self._teacher).open_embedder()

    def embed(self, shards: Sequence[int]) -> int:
        """Complete shards, except those that were stored before the task was lost; return their number of embedded rows."""
        table, reused = self._table, self._reuse
        self._note_embedded(0)
        missing = [shard for shard in shards if not table.is_intact(shard)]
        earlier = sum(len(embedding.new_rows(table, shard, reused)) for shard in set(shards).difference(missing))
        return earlier + sum(
            embedding.complete_shards(
                lambda: self._encoder,
                self._corpus,
                table,
                missing,
                self._tokens_per_batch,
                reused,
                self._note_embedded,
            )
        )

    def _note_embedded(self, rows: int) -> None:
        self._embedded = rows

    @ray.method(concurrency_group="heartbeat")  # type: ignore[untyped-decorator]
    def embedded(self) -> int:
        """Return the number of rows that the running task has embedded; answers during the task."""
        return self._embedded


def embedding_tasks(missing: Sequence[int], actors: int, is_on_gpu: bool) -> list[Sequence[int]]:
    """Split missing shards into the actors' tasks.

    A task on a CPU is one shard. An actor on a GPU stores a shard and tokenizes the next but one while its GPU computes, which
    only shards of one task can.
    """
    size = max(1, min(_MAX_TASK_SHARDS, len(missing) // (_MIN_TASKS * actors))) if is_on_gpu else 1
    return [missing[begin : begin + size] for begin in range(0, len(missing), size)]


def embed_shards(request: EmbeddingRequest) -> None:
    """Embed the missing shards of a table with a pool of actors, and restart actors that hang."""
    teacher, section, table, reporter = request.teacher, request.section, request.table, request.reporter
    nodes = alive()
    usable = nodes_with(nodes, section.node_labels, "teachers.node_labels")
    most = len(request.missing)
    each = {"CPU": 1.0, "GPU": plan_embedding(section, nodes, request.gpu_mode, [teacher], most).of(EMBEDDING)}
    count = min(most, section.embedding_workers or most, max(1, count_fitting(usable, each)))
    refuse_impossible([embedding_actors(section, count).request(1.0, each["GPU"])], nodes)
    if count < min(most, section.embedding_workers or 1):
        text = f"teacher {teacher.backbone}: {count} of {section.embedding_workers} embedding actors, as many as fit"
        reporter.warn(text)
    actor_class = ray.remote(num_cpus=each["CPU"], num_gpus=each["GPU"], **RESTARTABLE)(EmbeddingActor)
    corpus = request.corpus.store
    actors = [
        actor_class.options(
            name=f"embedding-{request.owner}-{table.identity.key[:8]}-{number}",
            get_if_exists=False,
            label_selector=section.node_labels,
        ).remote(teacher, corpus, table, section.tokens_per_batch, request.reuse)
        for number in range(count)
    ]
    try:
        with HeartbeatMonitor(section.heartbeat_timeout_s, reporter.warn) as monitor:
            for number, actor in enumerate(actors):
                monitor.add(f"embedding actor {number} of teacher {teacher.backbone}", actor)
            _EmbeddingTasks(request, actors, each).run()
    except RayTaskError as failed:
        raise cause_of(teacher, failed) from failed
    except RayActorError as lost:
        raise TeacherServerError(
            f"teacher {teacher.backbone}: an embedding actor crashed repeatedly; last error: {first_line(lost)}. Lower "
            "teachers.tokens_per_batch or teachers.embedding_workers; complete shards are kept"
        ) from lost
    finally:
        for actor in actors:
            ray.kill(actor)


class _EmbeddingTasks:
    """Gives shards to actors that are there. An actor that waits for resources gets none, and a lost one's are taken back."""

    def __init__(self, request: EmbeddingRequest, actors: Sequence[Any], each: Resources) -> None:
        self._request, self._each = request, each
        self._reporter, self._backbone = request.reporter, request.teacher.backbone
        self._waiting = deque(embedding_tasks(request.missing, len(actors), is_on_gpu=each["GPU"] > 0))
        self._starting = {actor.beat.remote(): actor for actor in actors}
        self._running: dict[Any, tuple[Any, Sequence[int]]] = {}
        self._idle: list[Any] = []
        self._losses: Counter[int] = Counter()
        """Times that a task was lost, by its first shard."""
        self._done = self._reported = 0
        self._asked: dict[Any, Any] = {}
        """Pending `embedded` calls -> the running task that each asks about."""
        self._embedded: dict[Any, int] = {}
        """Rows that running tasks have embedded."""
        self._wait_warning = WaitWarning(self._reporter)
        self._watchdog = ResourceWatchdog(
            [embedding_actors(request.section, 1).request(1.0, each["GPU"])], self._reporter.warn
        )

    def run(self) -> None:
        """Complete all shards."""
        while self._waiting or self._running:
            self._check()
            self._watchdog.check()
            for answer in ray.wait([*self._starting, *self._running], timeout=_POLL_S)[0]:
                if answer in self._running:
                    self._take_result(answer)
                else:
                    self._take_start(answer)
            while self._waiting and self._idle:
                actor, shards = self._idle.pop(), self._waiting.popleft()
                # Without retries, which would wait with the lost actor for resources while others are idle.
                call = actor.embed.options(name=_task_name(shards), max_task_retries=0)
                self._running[call.remote(shards)] = actor, shards
            self._report_progress()

    def _report_progress(self) -> None:
        """Take the answers of actors that were asked about their tasks, ask the others, and report what is embedded."""
        for answer in ray.wait([*self._asked], num_returns=len(self._asked), timeout=0)[0] if self._asked else []:
            with suppress(RayError):  # a lost actor's task is taken back, and its rows are embedded again
                self._embedded[self._asked[answer]] = ray.get(answer)
            del self._asked[answer]
        for task in self._running.keys() - {*self._asked.values()}:
            actor, _ = self._running[task]
            self._asked[actor.embedded.options(max_task_retries=0).remote()] = task
        self._embedded = {task: rows for task, rows in self._embedded.items() if task in self._running}
        if (embedded := self._done + sum(self._embedded.values())) > self._reported:
            self._reported = embedded
            self._request.on_rows(embedded)

    def _take_start(self, answer: Any) -> None:
        actor = self._starting.pop(answer)
        try:
            ray.get(answer)
        except ActorUnavailableError:  # its node may be lost, which Ray notices and repairs only after seconds
            self._starting[actor.beat.remote()] = actor
        else:
            self._idle.append(actor)

    def _take_result(self, answer: Any) -> None:
        actor, shards = self._running.pop(answer)
        try:
            self._done += ray.get(answer)
        except RayActorError:
            self._losses[shards[0]] += 1
            if self._losses[shards[0]] > _MAX_TASK_LOSSES:
                raise
            self._waiting.appendleft(shards)
            self._wait_warning.restart()
            self._starting[actor.beat.remote()] = actor  # raises an error if Ray does not restart the actor
        else:
            self._idle.append(actor)

    def _check(self) -> None:
        """End at a stop request, and report actors that wait for resources while there are shards for them."""
        self._reporter.check_stop(f"in the embedding pass of teacher {self._backbone} after {self._done:,} rows")
        if self._starting and self._waiting and self._wait_warning.is_due:
            waiting, needed = len(self._starting), format_resources(self._each)
            self._wait_warning.check(
                f"teacher {self._backbone} waits for a node with {needed} free ({waiting} of {waiting + len(self._running)} "
                "embedding actors wait); `ray status` shows who holds the resources"
            )


def _task_name(shards: Sequence[int]) -> str:
    return f"embed shard {shards[0]}" if len(shards) == 1 else f"embed shards {shards[0]} to {shards[-1]}"
