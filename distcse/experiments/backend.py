"""The interface of a backend: where a run embeds its corpus, serves its teachers and trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from distcse.data import Corpus
from distcse.events import Reporter
from distcse.placement.cluster import Cluster
from distcse.placement.devices import DeviceOptions
from distcse.recipe import GpuMode, TeacherSection, TeachersSection
from distcse.teachers.reuse import Reuse
from distcse.teachers.table import EmbeddingTable

if TYPE_CHECKING:
    from distcse.experiments.distillation.batch_loader import TrainSpec
    from distcse.experiments.mutual.group import Group
    from distcse.experiments.mutual.phase_trainer import GroupContext
    from distcse.experiments.mutual.resources import GroupResources
    from distcse.trainer.trainer import TrainResult

T = TypeVar("T")

GIB = 2.0**30


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


class Backend(Protocol):
    """Embeds the corpus into tables, serves the teachers, trains, and calls functions where the devices are."""

    @property
    def cluster(self) -> Cluster | None:
        """The cluster to join for the run. None if all work stays in this process, or for a sweep's trials: the sweep joins."""
        ...

    @property
    def is_for_trials(self) -> bool:
        """Whether it trains a sweep's trials, for which the sweep has decided the precisions."""
        ...

    def metered(self, reporter: Reporter, run: str) -> Reporter:
        """Return a reporter that also exports its events as metrics of `run`, if the backend has an exporter."""
        ...

    def embed(self, request: EmbeddingRequest) -> None:
        """Embed the missing shards of a teacher's table."""
        ...

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
        ...

    def open_groups(
        self, contexts: Sequence[GroupContext], reporters: Sequence[Reporter], resources: GroupResources
    ) -> AbstractContextManager[list[Group]]:
        """Start the groups of a mutual distillation, and close them at the end of the block.

        Args:
            contexts: Each group's part of the run.
            reporters: Receive each group's events.
            resources: What their workers reserve.
        """
        ...

    def share(self, value: T) -> Callable[[], T]:
        """Return a function that returns the value, for the functions of `run_on_devices`.

        However large the value and however many functions have it, a cluster stores it once, and each node fetches it once.

        Args:
            value: A picklable value.
        """
        ...

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
        ...
