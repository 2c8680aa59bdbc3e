"""The interface of an experiment, a kind of run: what commands, sweeps, the planner and the doctor ask of it, and how it opens.

To add a kind of run, see CONTRIBUTING.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from distcse import runs
from distcse.checks import Question, require
from distcse.devices.cluster import Cluster
from distcse.devices.device import DeviceSpeed
from distcse.devices.gpu_plan import PlansOfTrials, Process
from distcse.devices.resources import Node
from distcse.errors import ArgumentError, SearchSpaceError, StoppedEarlyError
from distcse.evaluation import Contamination, Tasks
from distcse.events import Event, LogMessage, Reporter, combine_listeners
from distcse.preflight.inputs import input_questions
from distcse.preflight.models import model_questions
from distcse.preflight.precision import Role
from distcse.preflight.warnings import SettingsWarning, report_warnings, warn_of_places, warn_of_unread_keys
from distcse.recipe import (
    BaseRecipe,
    MutualRecipe,
    Recipe,
    Sweep,
    TeachersSection,
    TrainedSection,
)
from distcse.recipe.section import unread_keys
from distcse.runs.backend import Backend
from distcse.runs.cluster_fit import NodeNeeds, gpu_policy
from distcse.runs.directory import RunDirectory, check_storage, require_lasting
from distcse.runs.lease import Lease
from distcse.runs.result import Result
from distcse.storage import ArtifactStore, to_uri
from distcse.teachers.table import EmbeddingTable
from distcse.text import Corpus
from distcse.tracking import require_packages
from distcse.training.engines import uses_deepspeed

R = TypeVar("R", bound=BaseRecipe)


class Experiment(ABC, Generic[R]):
    """A kind of run, with its recipe. Subclasses are registered with `register_experiment`.

    Args:
        recipe: The recipe to check or run.
    """

    name: ClassVar[str]
    """Name of this kind of run, in errors."""

    def __init__(self, recipe: R) -> None:
        self.recipe = recipe

    def check(self, backend: Backend, reporter: Reporter, plans_of_trials: PlansOfTrials | None = None) -> None:
        """Check everything that a run needs, without training (`--dry-run`): what each run asks, and what `rehearse` tries.

        Args:
            backend: Where the work would run.
            reporter: Receives the warnings, and a line for each thing tried.
            plans_of_trials: For a sweep, whose trials are scheduled differently than a single run: decides their GPUs from the
                cluster's nodes. None for a single run.
        """
        with gpu_policy(self.recipe.gpu_mode, computes_here=backend.cluster is None):
            require_lasting(self.recipe.storage)
            require([*self.questions(), *model_questions(self.recipe, fetch=True)])
            if plans_of_trials is None:
                self.require_room(backend.cluster)
            check_storage(self.recipe.storage)
            report_warnings(self.settings_warnings(), reporter)
            self.rehearse(backend, reporter, plans_of_trials)

    @abstractmethod
    def rehearse(self, backend: Backend, reporter: Reporter, plans_of_trials: PlansOfTrials | None = None) -> None:
        """Try what no question can tell, such as reading the data, loading the models and joining the cluster; see `check`."""

    @abstractmethod
    def fingerprints(self, reporter: Reporter) -> dict[str, str]:
        """Read the run's data, and fingerprint data and models by name: a rerun must match those of the first run."""

    @abstractmethod
    def run(self, backend: Backend, reporter: Reporter, directory: RunDirectory | None = None) -> Result:
        """Run the recipe, or resume an interrupted run.

        Args:
            backend: Where the work runs.
            reporter: Receives events. Its stop request ends the run: training writes a checkpoint first.
            directory: The run's folder, new or of an interrupted run; None creates one.
        """

    def questions(self, begun: RunDirectory | None = None) -> list[Question]:
        """Return what can be asked in under a second: each start of a run, `--dry-run`, a sweep and `doctor` ask the same.

        Default: for the recipe's text and labeled sets, and the packages of its loggers and engines. Models are asked for
        apart, because a begun run has them (`distcse.preflight.models`).
        """
        return questions_of(self.recipe)

    def settings_warnings(self, only_local: bool = False) -> list[SettingsWarning]:
        """Return the warnings of the recipe's settings, which runs, dry runs, plan and doctor report. Default: of any recipe.

        Args:
            only_local: Leave out those of models that would have to be downloaded. Default: False.
        """
        return [*warn_of_places(self.recipe), *warn_of_unread_keys(self.recipe, self.unread_keys())]

    def check_resources(self, nodes: Sequence[Node]) -> None:
        """Check that the nodes can run everything that must run at the same time. Default: any can."""
        return

    def require_room(self, cluster: Cluster | None) -> None:
        """Refuse, before anything starts, a run for which this machine alone is too small; other clusters are joined first."""
        if cluster is not None and not cluster.can_grow():
            self.check_resources(cluster.nodes())

    @property
    def needs(self) -> NodeNeeds | None:
        """Which nodes can work for the run, and what they must see. Default: unknown."""
        return None

    def precision_roles(self, devices: Sequence[DeviceSpeed]) -> list[Role]:
        """Return the parts of the run that have a precision, each on the given devices. Default: none."""
        return []

    def unread_keys(self) -> dict[str, str]:
        """Return the recipe's paths that nothing reads, whatever their value -> why. No model is loaded."""
        return unread_keys(self.recipe)

    @property
    def trials(self) -> Trials:
        """What a sweep asks of this kind of run. Raises `SearchSpaceError` if its recipes cannot be searched, the default."""
        raise SearchSpaceError(f"{self.name} has no sweeps; train each recipe by itself with python -m distcse.train")


def questions_of(recipe: BaseRecipe, needs_text: bool = True) -> list[Question]:
    """Ask for a recipe's text and labeled sets, and for the packages of its loggers and engines."""

    def ask_packages() -> None:
        require_packages(recipe.loggers)
        for section in recipe.loop_sections:
            uses_deepspeed(section)

    return [*input_questions(recipe, needs_text), ("packages", ask_packages)]


E = TypeVar("E", bound=type[Experiment[Any]])

EXPERIMENTS: dict[type[BaseRecipe], type[Experiment[Any]]] = {}
"""Registered experiments by their recipe's class."""


def register_experiment(recipe_class: type[BaseRecipe]) -> Callable[[E], E]:
    """Register the experiment of a class of recipes, itself registered with `register_recipe`; a class decorator."""

    def register(experiment_class: E) -> E:
        EXPERIMENTS[recipe_class] = experiment_class
        return experiment_class

    return register


def load_kinds() -> None:
    """Import the module `experiment` of every package next to this module, which registers a kind of run."""
    for package in iter_modules(runs.__path__):
        if package.ispkg:
            import_module(f"{runs.__name__}.{package.name}.experiment")


def experiment_of(recipe: BaseRecipe) -> Experiment[Any]:
    """Return the experiment that a recipe describes."""
    load_kinds()
    if type(recipe) not in EXPERIMENTS:
        name = type(recipe).__name__
        raise ArgumentError(
            f"there is no experiment for a {name}; import the module that registers one with @register_experiment({name})"
        )
    return EXPERIMENTS[type(recipe)](recipe)


TRIALS = "trials"
"""Name of the trials' processes."""


class TrialGpus(NamedTuple):
    """GPUs of a sweep's processes."""

    worker: float
    """GPUs of one training worker of a trial."""
    server: float
    """GPUs of one server that computes with a model or ranks."""


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

    @abstractmethod
    def train(self, backend: Backend, reporter: Reporter, directory: RunDirectory) -> Result:
        """Run `searched` as a trial, without what the sweep has done for all trials; see `Experiment.run`."""

    @abstractmethod
    def recipe(self, cpus: float, gpus: float) -> BaseRecipe:
        """Return the recipe that trials run: with their share of the cluster, without final evaluation and loggers."""

    @abstractmethod
    def with_precisions(self, cluster: Cluster, reporter: Reporter, gpus: TrialGpus) -> BaseRecipe:
        """Return the recipe with the precisions decided that all trials share."""

    def check_search(self, sweep: Sweep, paths: Iterable[str]) -> None:  # noqa: B027  (optional)
        """Check what a sweep asks of the recipe. Default: nothing."""

    @abstractmethod
    def check_labels(self) -> None:
        """Check the dev and test sets before the trials start."""

    @abstractmethod
    def prepare(self, backend: Backend, reporter: Reporter, sweep: RunDirectory) -> SharedTables | None:
        """Record the fingerprints of the trials' data, and prepare, once for all trials, what they read.

        Returns:
            The teachers' tables to serve; None if the trials need no servers.
        """

    @abstractmethod
    def scores(self, run: ArtifactStore) -> Callable[[Event], Iterable[TrialScore]]:
        """Return a function that finds a trial's new dev scores when an event arrives."""

    @abstractmethod
    def labelled_tasks(self) -> Tasks:
        """Read the test sets of the final evaluation."""

    @abstractmethod
    def models(self, run: ArtifactStore) -> dict[str, tuple[ArtifactStore, TrainedSection]]:
        """Return the models of a final run: their folders, and the recipe's sections of their encoders.

        Returns:
            By name; the name is empty if there is only one.
        """

    @abstractmethod
    def contamination(self, run: ArtifactStore, tasks: Tasks, reporter: Reporter) -> Contamination:
        """Find the test sentences on which the models of a final run were trained."""


class RunScope(NamedTuple):
    """An open run."""

    directory: RunDirectory
    lease: Lease
    reporter: Reporter
    """Also logs the events in the run's folder."""


@contextmanager
def open_run(
    experiment: Experiment[Any],
    backend: Backend,
    reporter: Reporter,
    directory: RunDirectory | None,
    is_trial: bool = False,
) -> Iterator[RunScope]:
    """Context manager: hold the lease of a run's folder, and start the backend's cluster in the background.

    GPUs are hidden from this process if the recipe wants none. Reports the warnings of the recipe's settings.
    """
    recipe = experiment.recipe
    with ExitStack() as scope:
        scope.enter_context(gpu_policy(recipe.gpu_mode, computes_here=backend.cluster is None and not is_trial))
        is_new = directory is None
        if is_new and not is_trial:
            require(model_questions(recipe, fetch=True))
            experiment.require_room(backend.cluster)
        directory = directory or RunDirectory.create(recipe)
        lease = scope.enter_context(directory.leased(reporter))
        if is_new and recipe.storage.run_id is not None:
            directory.request(recipe)
        reporter = Reporter(combine_listeners(directory.log, reporter.emit), reporter.stop_requested)
        reporter.emit(LogMessage(f"run directory {to_uri(directory.path)}"))
        scope.enter_context(backend.cluster.starting() if backend.cluster else nullcontext())
        if not is_trial:
            # A begun run has its models, apart from those that it has given up.
            report_warnings(experiment.settings_warnings(only_local=not is_new), reporter)
        try:
            yield RunScope(directory, lease, reporter)
        except StoppedEarlyError as stopped:
            if not is_trial:
                stopped.run = to_uri(directory.path)  # a family's own, after its student's
            raise
