"""A recipe carried out, as a function: the command prints what it returns.

It is `distcse.run` and not `train`: that is a module that `python -m` runs, and importing it would put it in the
function's place.
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
    """What a run left behind."""

    result: Result | MutualResult
    reports: Sequence[Path] = ()
    """The pages it was written up in."""
    compared: Compared | None = None
    """Of a rerun: its weights and the first run's."""

    @property
    def directory(self) -> Path:
        """The run's folder: recipe, events, checkpoints, models; of a run in object storage, its mirror on this machine."""
        return self.result.directory.path

    @property
    def uri(self) -> str:
        """What the run is called for `distcse.resume` and the commands, on this machine or another."""
        return to_uri(self.directory)

    @property
    def interrupted(self) -> bool:
        """Whether it was asked to stop before its end; `distcse.resume(run.directory)` goes on."""
        return self.result.train_result.interrupted if isinstance(self.result, Result) else self.result.interrupted

    @property
    def models(self) -> dict[str, Path]:
        """Folders of its models by name: `student`, or `GROUP bi` and `GROUP cross` of a mutual distillation."""
        if isinstance(self.result, Result):
            return {"student": self.result.directory.model}
        return {f"{best.group} {best.kind}": best.model for best in self.result.best}

    @property
    def model(self) -> Path:
        """Folder of its one model. `RunError` where there are several."""
        if len(models := self.models) != 1:
            raise RunArgumentError(
                f"{self.uri} has {len(models)} models; name one: run.models[{next(iter(models), 'NAME')!r}]"
            )
        return next(iter(models.values()))

    @property
    def scores(self) -> Measurement | None:
        """Start, student and teachers side by side; None where nothing was measured."""
        from distcse.measuring import Measurement

        return None if self.result.evaluation is None else Measurement(self.result.evaluation)

    def __repr__(self) -> str:
        return f"<Run {self.directory.name}{', interrupted' if self.interrupted else ''}>"

    def encoder(self) -> Encoder:
        """The student, loaded."""
        return Encoder.load(self.model)


def run(
    recipe: Recipe | MutualRecipe | str | Path,
    *overrides: str,
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Run:
    """Carry out a recipe, as `python -m distcse.train` does.

    Args:
        recipe: A recipe, a packaged one's name, or a YAML file.
        overrides: Knobs set over it, as on the command line: "training.lr=2e-5".
        listen: Hears every event; None shows progress on standard error.
        stop_requested: Asked now and then; True ends the run with a checkpoint.

    Raises:
        StoppedEarlyError: `stop_requested` while the run waited for room or for another run; there is no new checkpoint.
        DistcseError: With what to mend. Whatever was finished stays.
    """
    if isinstance(recipe, str | Path):
        recipe = read_recipe(str(recipe), overrides)
    elif overrides:
        raise RunArgumentError(
            "overrides go with a recipe's name or file; this recipe was read already: distcse.with_values(…)"
        )
    return _carried_out(recipe, None, listen, stop_requested)


def resume(
    directory: str | Path,
    *overrides: str,
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Run:
    """Go on with a run that was interrupted or killed, from its last checkpoint.

    Args:
        directory: The run's folder, or its address.
        overrides: Knobs that do not change what is learned, such as "training.workers=4".
        listen: As for `run`.
        stop_requested: As for `run`.
    """
    path = resolve_path(directory).absolute()
    require_lasting_run(path)
    begun, recipe = RunDirectory.reopen(path, list(overrides))
    require_lasting(recipe.storage, ["cache"])
    return _carried_out(recipe, begun, listen, stop_requested)


def rerun(
    directory: str | Path,
    *overrides: str,
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Run:
    """Do a run again in a new directory, on the same data, and compare the weights (`Run.compared`).

    Args:
        directory: The first run's folder, or its address.
        overrides: Knobs that do not change what is learned, and `storage.runs`.
        listen: As for `run`; packages, machine or code that are others now come as warnings.
        stop_requested: As for `run`.

    Raises:
        RunError: The first run did not come to its end, or its data are not what they were.
    """
    with open_listener(listen) as post:
        earlier = ReferenceRun.open(resolve_path(directory).absolute(), list(overrides), Reporter(post, stop_requested))
    recipe = earlier.recipe
    earlier.check_data(
        read_group_fingerprints(recipe) if isinstance(recipe, MutualRecipe) else read_fingerprints(recipe)
    )
    others = [f"other than in the first run: {warning}" for warning in earlier.warnings]
    done = _carried_out(recipe, None, listen, stop_requested, others)
    return done if done.interrupted else replace(done, compared=earlier.compare(done.directory))


def _carried_out(
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
    from distcse.report.page import write_pages  # it draws, and what draws takes half a second to import

    return Run(result, write_pages(evaluation, folder, read_run(folder)))
