"""What a sweep asks of an experiment whose recipe it searches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from distcse.devices.cluster import Cluster
from distcse.devices.gpu_plan import Process
from distcse.evaluation import Contamination, Tasks
from distcse.events import Event, Reporter
from distcse.recipe import BaseRecipe, MutualRecipe, Recipe, Sweep, TeachersSection, TrainedSection, decided
from distcse.runs.backend import Backend
from distcse.runs.cluster_fit import NodeNeeds
from distcse.runs.directory import RunDirectory
from distcse.runs.experiment import Result
from distcse.teachers.table import EmbeddingTable
from distcse.text import Corpus

TRIALS = "trials"
"""Name of the trials' processes."""


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


class TrialScore(NamedTuple):
    """A dev score of a trial."""

    step: int
    progress: float
    """Percent of the training that is done."""
    score: float


class Trials(ABC):
    """The trials of a sweep over one experiment's recipe."""

    leaves_threads: ClassVar[bool] = False
    """Whether a stopped trial's threads may train on for a while, so that its process cannot be reused."""

    def __init__(self, searched: Recipe | MutualRecipe) -> None:
        self.searched = searched

    @property
    @abstractmethod
    def processes(self) -> list[Process]:
        """The training workers of one trial, named `TRIALS`, then the servers that all trials share.

        A single worker trains in the trial's own process.
        """

    @property
    @abstractmethod
    def needs(self) -> NodeNeeds:
        """What every node must see, because a trial may run on any."""

    @property
    def teachers(self) -> TeachersSection | None:
        """Teachers that all trials share. Default: there are none."""
        return None

    @property
    def evaluation_precision(self) -> str:
        """Precision of the final evaluation."""
        return decided(self.searched.evaluation.precision)

    @abstractmethod
    def train(self, backend: Backend, reporter: Reporter, directory: RunDirectory) -> Result:
        """Run `searched` as a trial, without what the sweep has done for all trials; see `Experiment.run`."""

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
        """Return a function that finds a trial's new dev scores when an event arrives."""

    @abstractmethod
    def labelled_tasks(self) -> Tasks:
        """Read the test sets of the final evaluation."""

    @abstractmethod
    def models(self, run: Path) -> dict[str, tuple[Path, TrainedSection]]:
        """Return the models of a final run: their folders, and the recipe's sections of their encoders.

        Returns:
            By name; the name is empty if there is only one.
        """

    @abstractmethod
    def contamination(self, run: Path, tasks: Tasks, reporter: Reporter) -> Contamination:
        """Find the test sentences on which the models of a final run were trained."""
