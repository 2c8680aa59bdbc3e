"""Where a run embeds its corpus, serves its teachers and trains: the interface of a backend, and this process as one."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from distcse.devices import host
from distcse.devices.cluster import Cluster
from distcse.devices.device_plan import GIB, DeviceOptions
from distcse.devices.gpu_plan import GpuMode
from distcse.events import Reporter
from distcse.recipe import TeacherSection, TeachersSection
from distcse.runs.distillation.distillation_task import (
    TrainSpec,
    table_clients,
    teacher_clients,
    train_student,
    with_worker_tables,
)
from distcse.teachers.embedding import complete_shards
from distcse.teachers.kinds import kind_of
from distcse.teachers.lists import LocalTeacherClient, TeacherClient
from distcse.teachers.reuse import Reuse
from distcse.teachers.table import EmbeddingTable
from distcse.text import Corpus
from distcse.training.trainer import TrainResult

if TYPE_CHECKING:  # students' workers need no groups
    from distcse.runs.mutual.group import Group
    from distcse.runs.mutual.phase_store import GroupContext
    from distcse.runs.mutual.processes import GroupResources

T = TypeVar("T")


@dataclass(frozen=True)
class EmbeddingRequest:
    """The missing part of a teacher's table."""

    teacher: TeacherSection
    """The teacher that embeds."""
    section: TeachersSection
    """The recipe's teachers: number, resources and node labels of the processes that embed."""
    corpus: Corpus
    """The sentences."""
    table: EmbeddingTable
    """The table to complete."""
    missing: Sequence[int]
    """Numbers of its missing shards."""
    on_rows: Callable[[int], None]
    """Called between batches or shards with the number of rows embedded so far; ends the pass at a stop request."""
    reporter: Reporter
    """Receives warnings of unresponsive or lost processes, and answers whether a stop was requested."""
    gpu_mode: GpuMode = "auto"
    """The recipe's `resources.gpu`."""
    reuse: Reuse | None = None
    """An earlier table with some of the vectors."""
    owner: str = "distcse"
    """The recipe's name, part of the processes' names."""


@dataclass(frozen=True)
class DeviceCall(Generic[T]):
    """A function to call on one device."""

    name: str
    """Name in messages, such as `evaluation of teacher 0`."""
    function: Callable[[Reporter], T]
    """Picklable; receives a reporter whose events reach the run's. It may be repeated when its process is lost."""
    memory_bytes: float = 2 * GIB
    """Estimated memory of the process during the call."""
    returns_on_stop: bool = False
    """Whether the function returns soon after a stop was requested. It is waited for then, and also when another one fails.
    Otherwise it is ended."""


class Backend(ABC):
    """Where the work of a run is done: it embeds tables, trains students, and calls functions on devices."""

    cluster: Cluster | None = None
    """The cluster to join for the run. None if all work stays in this process, or for a sweep's trials: the sweep joins."""

    @abstractmethod
    def embed(self, request: EmbeddingRequest) -> None:
        """Embed the missing shards of a teacher's table."""

    @abstractmethod
    def train(
        self, spec: TrainSpec, corpus: Corpus, tables: Sequence[EmbeddingTable | None], reporter: Reporter
    ) -> TrainResult:
        """Serve the teachers and train the student.

        Args:
            spec: The run.
            corpus: The sentences.
            tables: One per teacher; None for a teacher that computes its similarities live.
            reporter: Receives the training's events.
        """

    def open_groups(
        self, contexts: Sequence[GroupContext], reporters: Sequence[Reporter], resources: GroupResources | None
    ) -> AbstractContextManager[list[Group]]:
        """Start the groups of a mutual distillation, and close them at the end of the block. Default: in this process.

        Args:
            contexts: The groups' parts of the run.
            reporters: Receive the groups' events.
            resources: What the groups' workers reserve; None without a cluster.
        """
        from distcse.runs.mutual.group import LocalGroup

        turn = threading.Lock()
        return nullcontext([LocalGroup(*each, turn) for each in zip(contexts, reporters, strict=True)])

    @abstractmethod
    def run_on_devices(self, calls: Sequence[DeviceCall[T]], options: DeviceOptions, reporter: Reporter) -> list[T]:
        """Call functions on the devices, one after the other on each, while nothing else of the run uses them.

        Args:
            calls: The functions.
            options: The nodes that can run them.
            reporter: Receives the functions' events. A requested stop ends them.

        Returns:
            What they return, in their order. None for one that returns on stop, if the request came before it began.

        Raises:
            StoppedEarlyError: A stop was requested, and a function does not return by itself then.
            ProcessLostError: A process crashed repeatedly.
            WorkFailedError: A function failed with an unexpected error in another process.
            DistcseError: A function raised it.
        """

    def share(self, value: T) -> Callable[[], T]:
        """Return a function that returns the value, for the functions of `run_on_devices`.

        However large the value and however many functions have it, a cluster stores it once, and each node fetches it once.
        """
        return lambda: value

    def metered(self, reporter: Reporter, run: str) -> AbstractContextManager[Reporter]:
        """Context manager: a reporter that also exports its events as metrics of `run`, if the backend has an exporter."""
        return nullcontext(reporter)


class LocalBackend(Backend):
    """Does all work in this process, one thing after the other, without Ray."""

    def embed(self, request: EmbeddingRequest) -> None:
        done = 0
        for rows in complete_shards(
            kind_of(request.teacher).open_embedder,
            request.corpus,
            request.table,
            request.missing,
            request.section.tokens_per_batch,
            request.reuse,
            request.on_rows,
        ):
            done += rows
            request.on_rows(done)

    def train(
        self, spec: TrainSpec, corpus: Corpus, tables: Sequence[EmbeddingTable | None], reporter: Reporter
    ) -> TrainResult:
        spec, live = with_worker_tables(spec, tables), dict[int, TeacherClient]()
        for number, table in enumerate(tables):
            if table is None:
                kind, tokens_per_batch = (
                    kind_of(spec.recipe.teachers.encoders[number]),
                    spec.recipe.teachers.tokens_per_batch,
                )
                live[number] = LocalTeacherClient(kind.open_live(corpus, tokens_per_batch))
        return train_student(spec, teacher_clients(spec, {**table_clients(spec, tables), **live}), reporter)

    def run_on_devices(self, calls: Sequence[DeviceCall[T]], options: DeviceOptions, reporter: Reporter) -> list[T]:
        results: list[Any] = []
        for call in calls:
            if call.returns_on_stop and reporter.stop_requested():
                results.append(None)
                continue
            reporter.check_stop(f"before the {call.name}")
            results.append(call.function(reporter))
            host.release_memory()  # training workers may use the same GPU
        return results
