"""A sweep's folder: how it begins, what a resumed sweep reads, and the checks before either.

`distcse.cluster.sweep` runs it: embeds the corpus once, searches, trains the best values and the original recipe with
several seeds.

<runs>/<name>-<time>/recipe.yaml, space.yaml   the recipe and the search space
                     run.json                  fingerprints of the data, as of a run; with an id, also requested.yaml
                     trials/<trial>/           trial.json, recipe.yaml, events.jsonl, tensorboard/ of every trial
                     ray_tune/                 Ray Tune's state, of the search and of the final runs
                     final_runs/<trial>/       the final runs, with their models
                     best.yaml                 the recipe with the best trial's values
                     trials.parquet, .csv      a row per trial
                     report.html, report.md    the report
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcse.checks import require
from distcse.errors import FrozenKeyError, RunDirectoryError, SearchSpaceError
from distcse.evaluation import Evaluation
from distcse.events import Reporter
from distcse.preflight.models import model_questions
from distcse.recipe import BaseRecipe, Sweep, read_recipe, read_sweep, with_values
from distcse.runs.directory import (
    RunDirectory,
    check_stored,
    differences,
    is_location,
    require_lasting_run,
    without_run_id,
    write_recipe,
)
from distcse.runs.experiment import experiment_of
from distcse.storage import ArtifactStore, open_store
from distcse.tuning.records import Trial
from distcse.tuning.space import Space


@dataclass(frozen=True)
class SweepResult:
    """The results of a sweep."""

    recipe: BaseRecipe
    sweep: Sweep
    directory: Path
    store: ArtifactStore
    """The directory, guarded by this start's lease."""
    trials: list[Trial]
    best_trial: Trial | None
    """The trial with the best dev score; None if no trial has one."""
    final_results: list[Trial]
    """The final runs: the best trial's values and the original recipe, each with every seed."""
    evaluation: Evaluation | None
    """The final runs' models on the test sets, without those that a stop left out; None if nothing was measured."""
    interrupted: bool
    """Whether the sweep was stopped before its end."""
    result_grid: Any = None
    """Ray Tune's `ResultGrid` of the search, for code that knows Ray Tune; None if the search was stopped."""

    @property
    def best_recipe(self) -> Path:
        """Path of the recipe with the best trial's values."""
        return self.directory / "best.yaml"


def begin(recipe: BaseRecipe, sweep: Sweep, reporter: Reporter | None = None) -> Path:
    """Create the folder of a new sweep, with its recipe and its search space.

    With `storage.run_id`, return the folder of the earlier sweep with this id, if there is one.

    Raises:
        FrozenKeyError: The earlier sweep has another recipe or another search space.
        RunInUseError: Another process works in the folder.
        EncoderError: A model is missing, or a setting does not fit it.
    """
    run_id = recipe.storage.run_id
    if run_id is None or not (open_store(recipe.storage.runs) / run_id).fetch("space.yaml"):
        require(model_questions(recipe, fetch=True))
    directory = RunDirectory.create(recipe.model_copy(update={"name": f"{recipe.name}-{sweep.name}"}))
    with directory.leased(reporter or Reporter()):
        if directory.store.fetch("space.yaml"):
            _take_up(directory, recipe, sweep)
            return directory.path
        if run_id is not None:
            directory.request(recipe)
        write_recipe(directory.store, without_run_id(recipe))
        write_recipe(directory.store, sweep, "space.yaml")
    return directory.path


def _take_up(directory: RunDirectory, recipe: BaseRecipe, sweep: Sweep) -> None:
    """Check that an earlier sweep has this recipe and space, and store the locations of files that have moved since."""
    stored, space = reopen(directory.path)
    moved = differences(directory.requested(), recipe)
    changed = [key for key, value in moved.items() if not is_location(value)]
    if changed or space != sweep:
        raise FrozenKeyError(
            f"{changed[0] if changed else 'the search space'} cannot change in a resumed sweep; "
            "restore it, or set another storage.run_id"
        )
    if moved:
        write_recipe(directory.store, with_values(stored, moved))


def reopen(path: Path, given: Collection[tuple[str, str]] = ()) -> tuple[BaseRecipe, Sweep]:
    """Read the recipe and the search space of an earlier sweep.

    Args:
        path: The sweep's folder.
        given: `BaseRecipe.given_keys` of a new sweep's recipe. Not used once the sweep has recorded its data: by then, all
            values are decided.

    Raises:
        RunDirectoryError: The folder is not that of a sweep.
    """
    require_lasting_run(path)
    inputs = path / "recipe.yaml", path / "space.yaml"
    store = open_store(path)
    if not all(store.fetch(file.name) for file in inputs):
        raise RunDirectoryError(
            f"{store} is not a sweep: it lacks recipe.yaml or space.yaml; give --resume the folder of a sweep"
        )
    for file in inputs:
        check_stored(file)
    recipe = read_recipe(str(inputs[0]))
    recipe = recipe if RunDirectory(path).is_recorded() else recipe.with_given_keys(given)
    return recipe, read_sweep(str(inputs[1]))


def check(recipe: BaseRecipe, sweep: Sweep) -> Space:
    """Check the search space, the dev set and the test sets before the sweep starts.

    Raises:
        SearchSpaceError: The space does not fit the recipe.
        EvaluationError: A dev or test set is missing, malformed or has too few labels.
    """
    if recipe.all_seeds:
        raise SearchSpaceError("seeds is for training; a sweep has sweep.final_runs.seeds: write seeds=[]")
    space = Space(sweep, recipe)
    trials = experiment_of(recipe).trials
    if recipe.dev_score == "none":
        raise SearchSpaceError(
            "evaluation.dev is none, but a sweep compares dev scores; set evaluation.data or evaluation.dev"
        )
    trials.check_search(sweep, space.parameters)
    precisions = [path for path, parameter in space.parameters.items() if path.endswith(".precision")]
    if undecided := [path for path in precisions if "auto" in (space.parameters[path].values or [])]:
        raise SearchSpaceError(
            f"parameters.{undecided[0]}: auto cannot be searched, since all trials share its result; write fp32 or bf16"
        )
    trials.check_labels()
    return space
