"""Run, resume and rerun recipes from Python; the commands print what these functions return.

The function is `distcse.run`, not `distcse.train`: importing the module `distcse.train` would replace a function of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from distcse.device import use_available_cpus
from distcse.errors import RunArgumentError
from distcse.events import Listener, LogMessage, Reporter
from distcse.experiments.distillation.fingerprints import read_fingerprints
from distcse.experiments.distillation.run import Result
from distcse.experiments.distillation.run import run as run_student
from distcse.experiments.mutual import MutualResult, run_mutual
from distcse.experiments.mutual.run import read_fingerprints as read_group_fingerprints
from distcse.models import Encoder
from distcse.recipe import MutualRecipe, Recipe, read_recipe
from distcse.report.card import write_card
from distcse.report.group_card import write_group_cards
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

    result: Result | MutualResult
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
        return self.result.train_result.interrupted if isinstance(self.result, Result) else self.result.interrupted

    @property
    def models(self) -> dict[str, Path]:
        """Folders of its models by name: `student`, or `GROUP bi` and `GROUP cross` of a mutual distillation."""
        if isinstance(self.result, Result):
            return {"student": self.result.directory.model}
        return {f"{best.group} {best.kind}": best.model for best in self.result.best}

    @property
    def model(self) -> Path:
        """Folder of its only model. Raises `RunArgumentError` if there are several."""
        if len(models := self.models) != 1:
            raise RunArgumentError(
                f"{self.uri} has {len(models)} models; name one: run.models[{next(iter(models), 'NAME')!r}]"
            )
        return next(iter(models.values()))

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
    recipe: Recipe | MutualRecipe | str | Path,
    *overrides: str,
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Run:
    """Train from a recipe, as `python -m distcse.train` does.

    Args:
        recipe: A recipe, a packaged one's name, or a YAML file.
        overrides: Values that override the recipe's, as on the command line: "training.lr=2e-5".
        listen: Called with every event; None shows progress on standard error.
        stop_requested: Polled during the run; True ends it with a checkpoint.

    Raises:
        StoppedEarlyError: `stop_requested` returned True while the run waited for resources or another run; no new checkpoint.
        DistcseError: The run failed; the message names the fix. Finished work is kept.
    """
    if isinstance(recipe, str | Path):
        recipe = read_recipe(str(recipe), overrides)
    elif overrides:
        raise RunArgumentError(
            "overrides go with a recipe's name or file; this recipe was read already: distcse.with_values(…)"
        )
    return _execute(recipe, None, listen, stop_requested)


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
    return _execute(recipe, begun, listen, stop_requested)


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
    with open_listener(listen) as post:
        earlier = ReferenceRun.open(resolve_path(directory).absolute(), list(overrides), Reporter(post, stop_requested))
    recipe = earlier.recipe
    earlier.check_data(
        read_group_fingerprints(recipe) if isinstance(recipe, MutualRecipe) else read_fingerprints(recipe)
    )
    others = [f"other than in the first run: {warning}" for warning in earlier.warnings]
    done = _execute(recipe, None, listen, stop_requested, others)
    return done if done.interrupted else replace(done, compared=earlier.compare(done.directory))


def _execute(
    recipe: Recipe | MutualRecipe,
    begun: RunDirectory | None,
    listen: Listener | None,
    stop_requested: Callable[[], bool],
    warnings: Sequence[str] = (),
) -> Run:
    result: Result | MutualResult
    use_available_cpus()
    with open_listener(listen) as post:
        reporter = Reporter(post, stop_requested)
        for warning in warnings:
            post(LogMessage(warning, warning=True))
        if isinstance(recipe, MutualRecipe):
            result = run_mutual(recipe, reporter, begun)
            write_group_cards(result)
        else:
            result = run_student(recipe, reporter, begun)
            write_card(result)
    folder, evaluation = result.directory.path, result.evaluation
    if evaluation is None:
        return Run(result, [])
    from distcse.report.page import write_pages  # imports the plotting library, which takes 0.5 s

    return Run(result, write_pages(evaluation, folder, read_run(folder)))
