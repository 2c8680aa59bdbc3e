"""The interface of an experiment, a kind of run: what commands, sweeps, the planner and the doctor ask of it.

To add a kind of run, see CONTRIBUTING.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from distcse import runs
from distcse.checks import Question, require
from distcse.devices.device import DeviceSpeed
from distcse.devices.gpu_plan import PlansOfTrials
from distcse.devices.resources import Node
from distcse.errors import ArgumentError, SearchSpaceError
from distcse.evaluation import Evaluation
from distcse.events import Reporter
from distcse.preflight.inputs import input_questions
from distcse.preflight.models import model_questions
from distcse.preflight.precision import Role
from distcse.preflight.warnings import SettingsWarning, report_warnings, warn_of_places, warn_of_unread_keys
from distcse.recipe import BaseRecipe, EncoderSection
from distcse.recipe.section import unread_keys
from distcse.runs.backend import Backend
from distcse.runs.cluster_fit import gpu_policy
from distcse.runs.directory import RunDirectory, check_storage, require_lasting
from distcse.runs.model_card import ModelCard
from distcse.tracking import require_packages
from distcse.training.engines import uses_deepspeed

if TYPE_CHECKING:
    from distcse.runs.trials import Trials

R = TypeVar("R", bound=BaseRecipe)


@dataclass(frozen=True)
class ReferenceModel:
    """A model that was not trained, next to which the trained ones are evaluated."""

    name: str
    """Name in tables."""
    section: EncoderSection
    """Where it is, and how it pools."""


@dataclass(frozen=True)
class Result:
    """Result of a run, of any kind."""

    recipe: BaseRecipe
    """The recipe, with the settings that it left to the run decided."""
    directory: RunDirectory
    """The run's folder."""
    interrupted: bool
    """Whether the run was asked to stop before its end."""
    evaluation: Evaluation | None
    """Scores on the test sets, without the models that a stop left out; None if nothing was measured."""
    models: Mapping[str, Path]
    """Folders of the trained models, by name."""
    unchanged: Sequence[str]
    """Names of the models that are their start, because training found no better dev score."""
    reference: ReferenceModel | None
    """A model to compare the trained ones with, such as the teacher; None if there is none."""
    summary: Sequence[str]
    """Lines for the terminal: the models and what happened to them."""
    cards: Sequence[ModelCard]
    """Cards of the trained models."""


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

        Raises:
            DistcseError: A check failed.
        """
        with gpu_policy(self.recipe.gpu_mode, computes_here=backend.cluster is None):
            require_lasting(self.recipe.storage)
            require([*self.questions(), *model_questions(self.recipe, fetch=True)])
            check_storage(self.recipe.storage)
            report_warnings(self.settings_warnings(), reporter)
            self.rehearse(backend, reporter, plans_of_trials)

    @abstractmethod
    def rehearse(self, backend: Backend, reporter: Reporter, plans_of_trials: PlansOfTrials | None = None) -> None:
        """Try what no question can tell, such as reading the data, loading the models and joining the cluster; see `check`."""

    @abstractmethod
    def fingerprints(self, reporter: Reporter) -> dict[str, str]:
        """Read the run's data, and fingerprint data and models by name: a rerun must match those of the first run.

        Args:
            reporter: Receives progress; its stop request ends the reading.

        Raises:
            StoppedEarlyError: A stop was requested.
        """

    @abstractmethod
    def run(self, backend: Backend, reporter: Reporter, directory: RunDirectory | None = None) -> Result:
        """Run the recipe, or resume an interrupted run.

        Args:
            backend: Where the work runs.
            reporter: Receives events. Its stop request ends the run: training writes a checkpoint first.
            directory: The run's folder, new or of an interrupted run; None creates one.

        Raises:
            DistcseError: The recipe, the data or the cluster has a problem. Finished work is kept.
        """

    def questions(self, begun: RunDirectory | None = None) -> list[Question]:
        """Return what can be asked in under a second: each start of a run, `--dry-run`, a sweep and `doctor` ask the same.

        Default: for the recipe's text and labelled sets, and the packages of its loggers and engines. Models are asked for
        apart, because a begun run has them (`distcse.preflight.models`).

        Args:
            begun: The folder of the run to resume, which may have what would be asked for. Default: none.
        """
        return questions_of(self.recipe)

    def settings_warnings(self, only_local: bool = False) -> list[SettingsWarning]:
        """Return the warnings of the recipe's settings that a run begins with (see `open_run`), and that `check` reports.

        Default: those of any recipe.

        Args:
            only_local: Skip models that would have to be downloaded. Default: False.
        """
        return [*warn_of_places(self.recipe), *warn_of_unread_keys(self.recipe, self.unread_keys())]

    def warnings(self, corpus_rows: int | None = None) -> list[SettingsWarning]:
        """Return all warnings that a run would report, from what is on this machine. Default: those that it begins with.

        Args:
            corpus_rows: Rows of the corpus to plan with, instead of those of the recipe's. Default: the recipe's.
        """
        return self.settings_warnings(only_local=True)

    def check_resources(self, nodes: Sequence[Node]) -> None:
        """Check that the nodes can run everything that must run at the same time. Default: any can.

        Raises:
            ClusterTooSmallError: They have too few CPUs or GPUs. `resources.gpu` is `required`, and a process gets no
                GPU.
                No node has the labels of a key.
        """
        return

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
    """Ask for a recipe's text and labelled sets, and for the packages of its loggers and engines."""

    def ask_packages() -> None:
        require_packages(recipe.loggers)
        for section in recipe.loop_sections:
            uses_deepspeed(section)

    return [*input_questions(recipe, needs_text), ("packages", ask_packages)]


E = TypeVar("E", bound=type[Experiment[Any]])

EXPERIMENTS: dict[type[BaseRecipe], type[Experiment[Any]]] = {}
"""Registered experiments by their recipe's class."""


def register_experiment(recipe_class: type[BaseRecipe]) -> Callable[[E], E]:
    """Register the experiment of a class of recipes; a class decorator.

    Args:
        recipe_class: The class, itself registered with `distcse.recipe.register_recipe`.
    """

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
    """Return the experiment that a recipe describes.

    Raises:
        ArgumentError: No experiment is registered for the recipe's class.
    """
    load_kinds()
    if type(recipe) not in EXPERIMENTS:
        name = type(recipe).__name__
        raise ArgumentError(
            f"there is no experiment for a {name}; import the module that registers one with @register_experiment({name})"
        )
    return EXPERIMENTS[type(recipe)](recipe)
