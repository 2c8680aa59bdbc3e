"""Run, resume and rerun recipes from Python; the commands print what these functions return.

The function is `distcse.run`, not `distcse.train`: importing the module `distcse.train` would replace a function of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from distcse.command import refuse_launchers
from distcse.device import use_available_cpus
from distcse.errors import RunArgumentError
from distcse.events import Listener, LogMessage, Reporter
from distcse.experiments.experiment import Result
from distcse.experiments.registry import experiment_of
from distcse.inputs import require_labelled
from distcse.models import Encoder
from distcse.ray_backend.backend import choose_backend
from distcse.recipe import BaseRecipe, read_recipe
from distcse.report.card import write_cards
from distcse.report.history import read_run
from distcse.report.progress import open_listener
from distcse.runs.directory import RunDirectory, require_lasting, require_lasting_run
from distcse.runs.reference_run import Compared, ReferenceRun
from distcse.storage import resolve_path, to_uri

if TYPE_CHECKING:
    from distcse.measuring import Measurement


@dataclass(frozen=True, repr=False)
class Run:
    """Results and files of a run."""

    result: Result
    reports: Sequence[Path] = ()
    """Paths of the report pages."""
    compared: Compared | None = None
    """Of a rerun: the comparison of its weights with the first run's."""

    @property
    def directory(self) -> Path:
        """The run's folder: recipe, events, checkpoints, models; of a run in object storage, its mirror on this machine."""
        return self.result.directory.path

    @property
    def uri(self) -> str:
        """Address of the run for `distcse.resume` and the commands, on this machine or another."""
        return to_uri(self.directory)

    @property
    def interrupted(self) -> bool:
        """Whether the run was stopped early; `distcse.resume(run.directory)` continues it."""
        return self.result.interrupted

    @property
    def models(self) -> dict[str, Path]:
        """Folders of its models by name: `student`, or `GROUP bi` and `GROUP cross` of a mutual distillation."""
        return self.result.models

    @property
    def model(self) -> Path:
        """Folder of its only model. Raises `RunArgumentError` if there are several."""
        if len(models := self.models) != 1:
            raise RunArgumentError(
                f"{self.uri} has {len(models)} models; name one: run.models[{next(iter(models), 'NAME')!r}]"
            )
        return next(iter(models.values()))

    @property
    def improved(self) -> bool:
        """Whether a model has a better dev score than its start; True without dev scores."""
        return not self.models or len(self.result.unchanged) < len(self.models)

    @property
    def scores(self) -> Measurement | None:
        """Scores of the initial student, the student and the teachers; None if nothing was evaluated."""
        from distcse.measuring import Measurement

        return None if self.result.evaluation is None else Measurement(self.result.evaluation)

    def __repr__(self) -> str:
        return f"<Run {self.directory.name}{', interrupted' if self.interrupted else ''}>"

    def encoder(self) -> Encoder:
        """Load the student."""
        return Encoder.load(self.model)


def run(
    recipe: BaseRecipe | str | Path,
    *overrides: str,
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Run:
    """Train from a recipe, as `python -m distcse.train` does. With `storage.run_id`, resume the run if it has begun.

    Args:
        recipe: A recipe, a packaged one's name, or a YAML file.
        overrides: Values that override the recipe's, as on the command line: "training.lr=2e-5".
        listen: Called with every event; None shows progress on standard error.
        stop_requested: Polled during the run; True ends it with a checkpoint.

    Raises:
        StoppedEarlyError: `stop_requested` returned True while the run waited for resources or another run; no new checkpoint.
        FrozenKeyError: The run with this `storage.run_id` has begun with other settings.
        DistcseError: The run failed; the message names the fix. Finished work is kept.
    """
    if isinstance(recipe, str | Path):
        recipe = read_recipe(recipe, overrides)
    elif overrides:
        raise RunArgumentError(
            "overrides go with a recipe's name or file; this recipe was read already: distcse.with_values(…)"
        )
    begun = None
    if recipe.storage.run_id is not None:
        begun, recipe = RunDirectory.reopen_by_id(recipe)
    require_labelled(recipe)
    experiment = experiment_of(recipe)
    with _reporting(listen, stop_requested) as reporter:
        return _finished(experiment.run(choose_backend(recipe), reporter, begun))


def resume(
    directory: str | Path,
    *overrides: str,
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Run:
    """Resume a run that was interrupted or killed, from its last checkpoint.

    Args:
        directory: The run's folder, or its address.
        overrides: Settings that do not change what is learned, such as "training.workers=4".
        listen: As for `run`.
        stop_requested: As for `run`.
    """
    path = resolve_path(directory).absolute()
    require_lasting_run(path)
    begun, recipe = RunDirectory.reopen(path, list(overrides))
    require_lasting(recipe.storage, ["cache"])
    require_labelled(recipe)
    with _reporting(listen, stop_requested) as reporter:
        return _finished(experiment_of(recipe).run(choose_backend(recipe), reporter, begun))


def rerun(
    directory: str | Path,
    *overrides: str,
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Run:
    """Repeat a run in a new directory, on the same data, and compare the weights (`Run.compared`).

    Args:
        directory: The first run's folder, or its address.
        overrides: Settings that do not change what is learned, and `storage.runs`.
        listen: As for `run`; changed packages, machine or code are reported as warnings.
        stop_requested: As for `run`.

    Raises:
        RunDirectoryError: The first run did not finish.
        ResumeMismatchError: The first run's data have changed.
    """
    with _reporting(listen, stop_requested) as reporter:
        earlier = ReferenceRun.open(resolve_path(directory).absolute(), list(overrides), reporter)
        require_labelled(earlier.recipe)
        experiment = experiment_of(earlier.recipe)
        earlier.check_data(experiment.fingerprints(reporter))
        for warning in earlier.warnings:
            reporter.emit(LogMessage(f"other than in the first run: {warning}", warning=True))
        done = _finished(experiment.run(choose_backend(earlier.recipe), reporter))
    return done if done.interrupted else replace(done, compared=earlier.compare(done.directory))


@contextmanager
def _reporting(listen: Listener | None, stop_requested: Callable[[], bool]) -> Iterator[Reporter]:
    """Context manager: use all available CPUs, and yield a reporter for the run's listener."""
    refuse_launchers()
    use_available_cpus()
    with open_listener(listen) as post:
        yield Reporter(post, stop_requested)


def _finished(result: Result) -> Run:
    """Write the model cards and the report pages of a run."""
    write_cards(result)
    if result.evaluation is None:
        return Run(result, [])
    from distcse.report.page import write_pages  # imports the plotting library, which takes 0.5 s

    history = read_run(result.directory.path)
    return Run(result, write_pages(result.evaluation, result.directory.store, history))
