"""Runs a sweep: embeds the corpus once, searches, trains the best values and the original recipe with several seeds.

<runs>/<name>-<time>/recipe.yaml, space.yaml   the recipe and the search space
                     trials/<trial>/           trial.json, recipe.yaml and events.jsonl of every trial
                     search/, finals/          Ray Tune's state and TensorBoard's files
                     winners/<trial>/          the final runs, with their models
                     best.yaml                 the recipe with the best trial's values
                     trials.parquet, .csv      a row per trial
                     report.html, report.md    the report
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcse.errors import RunDirectoryError, SearchSpaceError
from distcse.evaluation import Evaluation
from distcse.events import LogMessage, Reporter, combine_listeners
from distcse.experiments.distillation import roles as student_roles
from distcse.experiments.distillation.backends import RayBackend, read_by_workers
from distcse.experiments.distillation.preparation import PreparedCorpus
from distcse.experiments.mutual import roles as mutual_roles
from distcse.experiments.mutual.run import read_by_groups
from distcse.ray_backend.cluster import cluster
from distcse.ray_backend.nodes import alive
from distcse.recipe import MutualRecipe, Recipe, Sweep, read_recipe, read_sweep, recipe_yaml, with_values
from distcse.runs.directory import RunDirectory, check_storage, check_stored, require_lasting_run, write_recipe
from distcse.runs.lease import Lease
from distcse.storage import fetch, resolve_path, to_uri, write_text_atomic
from distcse.tuning.final_evaluation import check_labels, measure
from distcse.tuning.records import Trial, find_best_trial, read_trials
from distcse.tuning.space import Space
from distcse.tuning.sweep_backend import SweepBackend
from distcse.tuning.trial import TrialContext
from distcse.tuning.trial_table import write_tables

_TRIALS, _FINAL_RUNS = "trials", "winners"


@dataclass(frozen=True)
class SweepResult:
    """The results of a sweep."""

    recipe: Recipe | MutualRecipe
    sweep: Sweep
    directory: Path
    trials: list[Trial]
    best_trial: Trial | None
    """The trial with the best dev score; None if no trial has one."""
    final_results: list[Trial]
    """The final runs: the best trial's values and the original recipe, each with every seed."""
    evaluation: Evaluation | None
    """The final runs' models on the test sets; None if the sweep was stopped before."""
    interrupted: bool
    """Whether the sweep was stopped before its end."""

    @property
    def best_recipe(self) -> Path:
        """Path of the recipe with the best trial's values."""
        return self.directory / "best.yaml"


def begin(recipe: Recipe | MutualRecipe, sweep: Sweep) -> Path:
    """Create the folder of a new sweep, with its recipe and its search space."""
    path = RunDirectory.create(recipe.model_copy(update={"name": f"{recipe.name}-{sweep.name}"})).path
    write_recipe(path / "recipe.yaml", recipe)
    write_recipe(path / "space.yaml", sweep)
    return path


def reopen(path: Path) -> tuple[Recipe | MutualRecipe, Sweep]:
    """Read the recipe and the search space of an earlier sweep.

    Raises:
        RunDirectoryError: The folder is not that of a sweep.
    """
    require_lasting_run(path)
    inputs = path / "recipe.yaml", path / "space.yaml"
    if not all(fetch(file) for file in inputs):
        raise RunDirectoryError(
            f"{to_uri(path)} is not a sweep: it lacks recipe.yaml or space.yaml; give --resume the folder of a sweep"
        )
    for file in inputs:
        check_stored(file)
    return read_recipe(str(inputs[0])), read_sweep(str(inputs[1]))


def check(recipe: Recipe | MutualRecipe, sweep: Sweep) -> Space:
    """Check the search space, the dev set and the test sets before the sweep starts.

    Raises:
        SearchSpaceError: The space does not fit the recipe.
        EvaluationError: A dev or test set is missing, malformed or has too few labels.
    """
    space = Space(sweep, recipe)
    if (recipe.dev_score if isinstance(recipe, Recipe) else recipe.evaluation.dev) == "none":
        raise SearchSpaceError(
            "evaluation.dev is none, but a sweep compares dev scores; set evaluation.data or evaluation.dev"
        )
    if isinstance(recipe, Recipe):
        if sweep.schedule.kind == "pbt" and recipe.training.workers > 1:
            raise SearchSpaceError(
                "schedule.kind is pbt, which copies checkpoints between trials with one worker; write training.workers: 1"
            )
        if recipe.dev_score == "agreement" and (
            weights := next((p for p in space.parameters if p.endswith(".alpha")), None)
        ):
            raise SearchSpaceError(
                f"parameters.{weights} cannot be searched with evaluation.dev=agreement, which depends on the weights; "
                "set evaluation.data, or remove the weights from the space"
            )
    precisions = [path for path, parameter in space.parameters.items() if path.endswith(".precision")]
    if undecided := [path for path in precisions if "auto" in (space.parameters[path].values or [])]:
        raise SearchSpaceError(
            f"parameters.{undecided[0]}: auto cannot be searched, since all trials share its result; write fp32 or bf16"
        )
    check_labels(recipe)
    return space


def run_sweep(recipe: Recipe | MutualRecipe, sweep: Sweep, directory: Path, reporter: Reporter) -> SweepResult:
    """Run a sweep in its folder, or resume it. Test sets are only used after the search.

    Args:
        recipe: The recipe whose parameters are searched.
        sweep: The search space, the search, the scheduler and the final runs.
        directory: Folder of the sweep, from `begin`.
        reporter: Receives progress; can request a stop.

    Returns:
        The results, also if the sweep was stopped.

    Raises:
        DistcseError: The sweep cannot continue. Ended trials are not repeated on resuming.
    """
    space = check(recipe, sweep)
    with Lease.held(directory, reporter):
        return _run(
            recipe, sweep, space, directory, Reporter(combine_listeners(reporter.emit), reporter.stop_requested)
        )


def _run(recipe: Recipe | MutualRecipe, sweep: Sweep, space: Space, directory: Path, reporter: Reporter) -> SweepResult:
    reporter.emit(LogMessage(f"sweep directory {to_uri(directory)}"))
    final_results: list[Trial] = []
    evaluation = None
    interrupted = False
    with cluster(fast_allocator=True):
        from distcse.tuning.ray_tune import StoppedError, loggers, search, train_all
        from distcse.tuning.trial_resources import lost_gpus_of_trials, trial_recipe, trial_resources

        loggers(sweep)  # fail before the teachers embed the corpus
        resources = trial_resources(recipe, sweep)
        for warning in lost_gpus_of_trials(recipe, sweep, resources, alive()):
            reporter.emit(LogMessage(warning, warning=True))
        recipe = _with_precisions(recipe, directory, resources.gpus, reporter)
        _require_shared(recipe, directory)
        with _teachers(recipe, resources.in_own_process, reporter) as backend:
            try:
                trained = trial_recipe(recipe, resources)
                search(
                    TrialContext(trained, directory / _TRIALS, backend),
                    space,
                    sweep,
                    directory / "search",
                    resources,
                    reporter,
                )
                best_trial = _write_best_recipe(recipe, directory)
                if best_trial is not None and sweep.final_runs.seeds:
                    context = TrialContext(trained, directory / _FINAL_RUNS, backend, keep_models=True)
                    train_all(context, _with_seeds(best_trial, sweep), sweep, directory / "finals", resources, reporter)
            except StoppedError:
                interrupted = True
    trials, best_trial = read_trials(directory / _TRIALS), _write_best_recipe(recipe, directory)
    write_tables(trials, directory)
    if best_trial is not None and not interrupted:
        final_results = read_trials(directory / _FINAL_RUNS)
        evaluation = measure(recipe, final_results, directory / _FINAL_RUNS, reporter)
        if evaluation is not None:
            evaluation.write(directory / "evaluation.json")
    return SweepResult(recipe, sweep, directory, trials, best_trial, final_results, evaluation, interrupted)


def _with_precisions(
    recipe: Recipe | MutualRecipe, directory: Path, gpus: float, reporter: Reporter
) -> Recipe | MutualRecipe:
    """Return the recipe with the precisions that all trials share, and save it for a resumed sweep."""
    undecided = recipe
    if isinstance(recipe, MutualRecipe):
        recipe = mutual_roles.with_precisions(recipe, reporter, gpus)
    else:
        recipe = student_roles.with_precisions(recipe, reporter, gpus)
    if recipe != undecided:
        write_recipe(directory / "recipe.yaml", recipe)
    return recipe


def _require_shared(recipe: Recipe | MutualRecipe, directory: Path) -> None:
    """Check that every node sees the sweep's folders, since a trial may run on any node."""
    from distcse.ray_backend.shared_storage import require_shared

    written = {"storage.runs": directory}
    if isinstance(recipe, Recipe):
        check_storage(recipe.storage, ["cache"])
        written["storage.cache"] = resolve_path(recipe.storage.cache)
    read = read_by_workers(recipe) if isinstance(recipe, Recipe) else read_by_groups(recipe)
    require_shared(written, read, [None])


@contextmanager
def _teachers(recipe: Recipe | MutualRecipe, in_own_process: bool, reporter: Reporter) -> Iterator[SweepBackend | None]:
    """Build the teachers' tables and start their servers once for all trials; None for a mutual distillation."""
    if isinstance(recipe, MutualRecipe):
        yield None
        return
    from distcse.teachers.servers import served

    text = PreparedCorpus.prepare(recipe, reporter)
    _ = text.initial_encoder  # fail once, not in every trial, if the student cannot be loaded
    tables = text.tables(RayBackend(), reporter)
    text.neighbours(tables, reporter)  # once, not in all trials at the same time
    section = recipe.teachers
    served_teachers = [number for number, table in enumerate(tables) if table is None or not in_own_process]
    with served(section, text.corpus, tables, reporter, served_teachers) as servers:
        yield SweepBackend(servers, in_own_process)


def _write_best_recipe(recipe: Recipe | MutualRecipe, directory: Path) -> Trial | None:
    best_trial = find_best_trial(read_trials(directory / _TRIALS))
    if best_trial is not None:
        write_text_atomic(directory / "best.yaml", recipe_yaml(with_values(recipe, best_trial.values)))
    return best_trial


def _with_seeds(best_trial: Trial, sweep: Sweep) -> list[dict[str, Any]]:
    """Return the final runs' values: the best trial's and the original recipe's, with each seed."""
    final_values = [{**best_trial.values, "seed": seed} for seed in sweep.final_runs.seeds]
    return final_values + [{"seed": seed} for seed in sweep.final_runs.seeds if sweep.final_runs.compare]
