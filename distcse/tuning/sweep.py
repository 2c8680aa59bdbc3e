"""Runs a sweep: embeds the corpus once, searches, trains the best values and the original recipe with several seeds.

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

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcse.checks import require
from distcse.errors import FrozenKeyError, RunDirectoryError, SearchSpaceError, StoppedEarlyError
from distcse.evaluation import Evaluation
from distcse.events import LogMessage, Reporter, combine_listeners
from distcse.experiments.backend import Backend
from distcse.experiments.cluster_fit import gpu_policy, joined_for_devices, waited_for_nodes
from distcse.experiments.experiment import experiment_of
from distcse.experiments.stoppable_evaluation import FinalScores
from distcse.experiments.trials import TrialGpus, Trials
from distcse.placement.cluster import Cluster
from distcse.placement.gpu_plan import report_plans
from distcse.preflight.models import model_questions
from distcse.preflight.warnings import report_warnings
from distcse.recipe import BaseRecipe, Sweep, read_recipe, read_sweep, recipe_yaml, with_values
from distcse.runs.directory import (
    RunDirectory,
    check_storage,
    check_stored,
    differences,
    is_location,
    require_lasting_run,
    without_run_id,
    write_recipe,
)
from distcse.storage import ArtifactStore, open_store
from distcse.tracking import require_trial_loggers
from distcse.tuning.backend import StoppedError, SweepBackend
from distcse.tuning.final_evaluation import measure
from distcse.tuning.records import Trial, find_best_trial, read_trials, write_tables
from distcse.tuning.space import Space
from distcse.tuning.trial import TrialContext
from distcse.tuning.trial_resources import TrialResources, least_requests, plans_of_trials, trial_resources
from distcse.tuning.trial_tracking import track_trials

_TRIALS, _FINAL_RUNS = "trials", "final_runs"
_RAY_TUNE = "ray_tune"


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

    Args:
        recipe: The recipe whose parameters are searched.
        sweep: The search space.
        reporter: Receives a message if checking the folder's lease takes up to 60 s. Default: none does.

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


def run_sweep(
    recipe: BaseRecipe, sweep: Sweep, directory: Path, backend: SweepBackend, reporter: Reporter
) -> SweepResult:
    """Run a sweep in its folder, or resume it. Test sets are only used after the search.

    Args:
        recipe: The recipe whose parameters are searched.
        sweep: The search space, the search, the scheduler and the final runs.
        directory: Folder of the sweep, from `begin`.
        backend: Where the teachers are embedded and served, and the trials run.
        reporter: Receives progress; can request a stop.

    Returns:
        The results, also if the sweep was stopped.

    Raises:
        DistcseError: The sweep cannot continue. Ended trials are not repeated on resuming.
    """
    space = check(recipe, sweep)
    policy, folder = gpu_policy(recipe.gpu_mode, computes_here=False), RunDirectory(directory)
    with policy, folder.leased(reporter), joined_for_devices(backend.cluster):
        reporter = Reporter(combine_listeners(reporter.emit), reporter.stop_requested)
        try:
            return _run(recipe, sweep, space, folder, backend, reporter)
        except StoppedEarlyError as stopped:
            stopped.run = str(folder.store)
            raise


def _run(
    recipe: BaseRecipe,
    sweep: Sweep,
    space: Space,
    folder: RunDirectory,
    backend: SweepBackend,
    reporter: Reporter,
) -> SweepResult:
    directory, store = folder.path, folder.store
    reporter.emit(LogMessage(f"sweep directory {store}"))
    interrupted, result_grid = False, None
    report_warnings(experiment_of(recipe).settings_warnings(), reporter)  # once, not in every trial
    least = least_requests(recipe)
    with backend.cluster.joined(), waited_for_nodes(backend.cluster, recipe, least, reporter):
        require_trial_loggers(sweep.loggers)  # fail before the teachers embed the corpus
        nodes = backend.cluster.nodes()
        resources = trial_resources(recipe, sweep, nodes)
        report_plans(plans_of_trials(recipe, sweep, resources, nodes), reporter.emit)
        recipe = _with_precisions(recipe, backend.cluster, folder, resources.trial_gpus, reporter)
        shared = experiment_of(recipe).trials
        _require_shared(recipe, shared, backend.cluster, directory)
        with _trial_backend(shared, backend, resources, reporter, folder) as trial_backend:
            recipe, _ = reopen(directory)  # with what was decided from the data, as a resumed sweep reads it
            shared = experiment_of(recipe).trials
            try:
                trained = shared.recipe(resources.cpus, resources.gpus)
                context = TrialContext(trained, store / _TRIALS, trial_backend)
                with track_trials(sweep, context, reporter) as tracked:
                    result_grid = backend.search(
                        context, space, sweep, directory / _RAY_TUNE / "search", resources, tracked
                    )
                best_trial = _write_best_recipe(recipe, store)
                if best_trial is not None and sweep.final_runs.seeds:
                    context = TrialContext(trained, store / _FINAL_RUNS, trial_backend, keep_models=True)
                    values, state = _with_seeds(best_trial, sweep), directory / _RAY_TUNE / "final_runs"
                    with track_trials(sweep, context, reporter) as tracked:
                        backend.train_all(context, values, sweep, state, resources, tracked)
            except StoppedError:
                interrupted = True
    trials, best_trial = read_trials(directory / _TRIALS), _write_best_recipe(recipe, store)
    write_tables(trials, store)
    final_results, final_runs = read_trials(directory / _FINAL_RUNS), store / _FINAL_RUNS
    final = FinalScores(None, stopped=interrupted)
    if best_trial is not None and not interrupted:
        final = measure(shared, final_results, final_runs, recipe.gpu_mode, backend.run_backend, reporter)
        final.write(store, final_runs)
    evaluation, is_stopped = final.evaluation, final.stopped
    return SweepResult(
        recipe, sweep, directory, store, trials, best_trial, final_results, evaluation, is_stopped, result_grid
    )


def _with_precisions(
    recipe: BaseRecipe, cluster: Cluster, folder: RunDirectory, gpus: TrialGpus, reporter: Reporter
) -> BaseRecipe:
    """Return the recipe with the precisions that all trials share, and save it for a resumed sweep."""
    decided = experiment_of(recipe).trials.with_precisions(cluster, reporter, gpus)
    if decided != recipe:
        folder.decide(decided)
    return decided


def _require_shared(recipe: BaseRecipe, trials: Trials, cluster: Cluster, directory: Path) -> None:
    """Check that every node that can run a trial, or its teachers, sees the sweep's folders."""
    needs, (workers, *_) = trials.needs, trials.processes
    check_storage(recipe.storage, [key.removeprefix("storage.") for key in needs.written])
    # The process that starts a trial's workers reserves next to nothing, and runs on any node.
    labels = [workers.labels if workers.number == 1 else None]
    labels += [] if trials.teachers is None else [trials.teachers.node_labels]
    cluster.require_shared({"storage.runs": directory, **needs.written}, needs.read, labels)


@contextmanager
def _trial_backend(
    trials: Trials, backend: SweepBackend, resources: TrialResources, reporter: Reporter, folder: RunDirectory
) -> Iterator[Backend | None]:
    """Check that the trials' data are those with which the sweep began; then build tables and start servers once for all.

    Yields:
        The backend of the trials; None for trials without teachers, which run in their own process.
    """
    shared, section = trials.prepare(backend.run_backend, reporter, folder), trials.teachers
    if shared is None or section is None:
        yield None
        return
    name = folder.path.name
    with backend.serve_trials(section, shared.corpus, shared.tables, resources, reporter, name) as trial_backend:
        yield trial_backend


def _write_best_recipe(recipe: BaseRecipe, store: ArtifactStore) -> Trial | None:
    best_trial = find_best_trial(read_trials(store.path / _TRIALS))
    if best_trial is not None:
        store.write_text("best.yaml", recipe_yaml(with_values(recipe, best_trial.values)))
    return best_trial


def _with_seeds(best_trial: Trial, sweep: Sweep) -> list[dict[str, Any]]:
    """Return the final runs' values: the best trial's and the original recipe's, with each seed."""
    final_values = [{**best_trial.values, "seed": seed} for seed in sweep.final_runs.seeds]
    return final_values + [{"seed": seed} for seed in sweep.final_runs.seeds if sweep.final_runs.compare]
