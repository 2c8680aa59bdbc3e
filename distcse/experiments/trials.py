"""What a sweep asks of an experiment whose recipe it searches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from distcse.data import Corpus
from distcse.evaluation import Contamination, Tasks
from distcse.events import Event, Reporter
from distcse.experiments.backend import Backend
from distcse.placement.cluster import Cluster
from distcse.recipe import BaseRecipe, Sweep, TeachersSection, TrainedSection
from distcse.runs.directory import RunDirectory
from distcse.teachers.table import EmbeddingTable


@dataclass(frozen=True)
class TrialRequest:
    """The processes that a trial needs."""

    workers: int = 0
    """Training workers; with 0 or 1, the trial trains in its own process."""
    cpus_per_worker: float | None = None
    """CPUs of one worker; None is an even share."""
    gpus_per_worker: float | None = None
    """GPUs of one worker; None is one GPU if there are any."""
    node_labels: Mapping[str, str] | None = None
    """Labels of the nodes of the workers; None is any node."""
    teachers: TeachersSection | None = None
    """Teachers that all trials share; None if there are none."""
    leaves_threads: bool = False
    """Whether a stopped trial's threads may train on for a while, so that its process cannot be reused."""


class TrialGpus(NamedTuple):
    """GPUs of a sweep's processes."""

    worker: float
    """Of one training worker of a trial."""
    server: float
    """Of one server that computes with a model or ranks."""


@dataclass(frozen=True)
class SharedTables:
    """The corpus and the teachers' tables that all trials share."""

    corpus: Corpus
    tables: Sequence[EmbeddingTable | None]
    """One per teacher; None for a live teacher."""


@dataclass(frozen=True)
class SharedPaths:
    """Paths that the nodes of a trial must see, by recipe key."""

    read: Mapping[str, Path]
    """Names of hub models are included, as paths that do not exist."""
    written: Mapping[str, Path] = field(default_factory=dict)
    """Folders that trials write to, apart from their own."""


class TrialScore(NamedTuple):
    """A dev score of a trial."""

    step: int
    progress: float
    """Percent of the training that is done."""
    score: float


class Trials(ABC):
    """The trials of a sweep over one experiment's recipe."""

    @property
    @abstractmethod
    def request(self) -> TrialRequest:
        """The processes that a trial needs."""

    @property
    @abstractmethod
    def paths(self) -> SharedPaths:
        """Paths that every node must see, because a trial may run on any."""

    @property
    @abstractmethod
    def evaluation_precision(self) -> str:
        """Precision of the final evaluation."""

    @abstractmethod
    def recipe(self, cpus: float, gpus: float) -> BaseRecipe:
        """Return the recipe that trials run: with their share of the cluster, without final evaluation and loggers.

        Args:
            cpus: CPUs of one training worker.
            gpus: GPUs of one training worker.
        """

    @abstractmethod
    def with_precisions(self, cluster: Cluster, reporter: Reporter, gpus: TrialGpus) -> BaseRecipe:
        """Return the recipe with the precisions decided that all trials share.

        Args:
            cluster: The sweep's cluster.
            reporter: Receives the choice.
            gpus: GPUs of the trials and their servers.
        """

    def check_search(self, sweep: Sweep, paths: Iterable[str]) -> None:  # noqa: B027  (optional)
        """Check what a sweep asks of the recipe. Default: nothing.

        Args:
            sweep: The sweep.
            paths: Paths of the searched parameters.

        Raises:
            SearchSpaceError: The recipe and the sweep do not fit together.
        """

    @abstractmethod
    def check_labels(self) -> None:
        """Check the dev and test sets before the trials start.

        Raises:
            EvaluationError: A set is missing, malformed or has too few labels.
        """

    @abstractmethod
    def prepare(self, backend: Backend, reporter: Reporter, sweep: RunDirectory) -> SharedTables | None:
        """Record the fingerprints of the trials' data, and prepare, once for all trials, what they read.

        Args:
            backend: Where the teachers embed the corpus.
            reporter: Receives progress.
            sweep: The sweep's folder.

        Returns:
            The teachers' tables to serve; None if the trials need no servers.

        Raises:
            ResumeMismatchError: The data have changed since the sweep began.
        """

    @abstractmethod
    def scores(self, run: Path) -> Callable[[Event], Iterable[TrialScore]]:
        """Return a function that finds a trial's new dev scores when an event arrives.

        Args:
            run: The trial's folder.
        """

    @abstractmethod
    def labelled_tasks(self) -> Tasks:
        """Read the test sets of the final evaluation."""

    @abstractmethod
    def models(self, run: Path) -> dict[str, tuple[Path, TrainedSection]]:
        """Return the models of a final run: their folders, and the recipe's sections of their encoders.

        Args:
            run: The run's folder.

        Returns:
            By name; the name is empty if there is only one.
        """

    @abstractmethod
    def contamination(self, run: Path, tasks: Tasks, reporter: Reporter) -> Contamination:
        """Find the test sentences on which the models of a final run were trained."""
