"""One sweep: tables once, a search, the winner trained again, everything on its storage.

<runs>/<name>-<time>/recipe.yaml, space.yaml   what was asked
                     trials/<trial>/           trial.json, recipe.yaml, events.jsonl of every trial
                     search/, finals/          Ray Tune's own state, and TensorBoard's files
                     winners/<trial>/          the winner's and the recipe's runs with other seeds, with their models
                     best.yaml                 the recipe with the winner's values
                     trials.parquet, .csv      a row a trial
                     report.html, report.md    all of it as a page
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcse.errors import RunDirectoryError, SearchSpaceError
from distcse.evaluation import Evaluation
from distcse.events import LogMessage, Reporter, one_by_one
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
from distcse.tuning.records import Trial, read_trials, winner_of
from distcse.tuning.space import Space
from distcse.tuning.sweep_backend import SweepBackend
from distcse.tuning.trial import TrialContext
from distcse.tuning.trial_table import write_tables

_TRIALS, _WINNERS = "trials", "winners"


@dataclass(frozen=True)
class SweepResult:
    """What a sweep leaves behind."""

    recipe: Recipe | MutualRecipe
    sweep: Sweep
    directory: Path
    trials: list[Trial]
    best_trial: Trial | None
    """None where no trial came to a dev score."""
    final_results: list[Trial]
    """The runs at the end: the winner's values, and the recipe's own, each with every seed."""
    evaluation: Evaluation | None
    """Models of those runs on the test sets; None when the sweep was stopped before."""
    interrupted: bool

    @property
    def best_recipe(self) -> Path:
        """The recipe to train with."""
        return self.directory / "best.yaml"


def begin(recipe: Recipe | MutualRecipe, sweep: Sweep) -> Path:
    """A folder for a new sweep, with what was asked in it."""
    path = RunDirectory.create(recipe.model_copy(update={"name": f"{recipe.name}-{sweep.name}"})).path
    write_recipe(path / "recipe.yaml", recipe)
    write_recipe(path / "space.yaml", sweep)
    return path


def reopen(path: Path) -> tuple[Recipe | MutualRecipe, Sweep]:
    """What was asked of an earlier sweep."""
    require_lasting_run(path)
    asked = path / "recipe.yaml", path / "space.yaml"
    if not all(fetch(file) for file in asked):
        raise RunDirectoryError(
            f"{to_uri(path)} is no sweep: it lacks recipe.yaml or space.yaml; --resume wants a folder that a sweep made"
        )
    for file in asked:
        check_stored(file)
    return read_recipe(str(asked[0])), read_sweep(str(asked[1]))


def check(recipe: Recipe | MutualRecipe, sweep: Sweep) -> Space:
    """All that can be known before the work: knobs, dev set, test sets. Raises a `DistcseError` that names what to mend."""
    space = Space(sweep, recipe)
    if (recipe.dev_score if isinstance(recipe, Recipe) else recipe.evaluation.dev) == "none":
        raise SearchSpaceError(
            "evaluation.dev is none, but a sweep chooses by the dev score; write evaluation.data or evaluation.dev"
        )
    if isinstance(recipe, Recipe):
        if sweep.schedule.kind == "pbt" and recipe.training.workers > 1:
            raise SearchSpaceError(
                "pbt hands checkpoints from trial to trial in their own processes; write training.workers: 1"
            )
        if recipe.dev_score == "agreement" and (
            weights := next((p for p in space.parameters if p.endswith(".alpha")), None)
        ):
            raise SearchSpaceError(
                f"knobs.{weights} would choose itself: the dev score is the agreement with the teachers' weighted mean; give "
                "evaluation.data, or take the weights out of the space"
            )
    asks = [path for path, parameter in space.parameters.items() if path.endswith(".precision")]
    if undecided := [path for path in asks if "auto" in (space.parameters[path].values or [])]:
        raise SearchSpaceError(f"knobs.{undecided[0]}: auto is decided once for all trials; write fp32 or bf16")
    check_labels(recipe)
    return space


def run_sweep(recipe: Recipe | MutualRecipe, sweep: Sweep, directory: Path, reporter: Reporter) -> SweepResult:
    """Carry out a sweep in its folder, or go on with it. Test sets are read by nothing before the winner is known.

    Raises:
        DistcseError: It names what to mend; trials that ended stay ended.
    """
    space = check(recipe, sweep)
    with Lease.held(directory, reporter):
        return _run(recipe, sweep, space, directory, Reporter(one_by_one(reporter.emit), reporter.stop_requested))


def _run(recipe: Recipe | MutualRecipe, sweep: Sweep, space: Space, directory: Path, reporter: Reporter) -> SweepResult:
    reporter.emit(LogMessage(f"sweep directory {to_uri(directory)}"))
    winners: list[Trial] = []
    evaluation = None
    interrupted = False
    with cluster(fast_allocator=True):
        from distcse.tuning.ray_tune import StoppedError, loggers, search, train_all
        from distcse.tuning.trial_resources import lost_gpus_of_trials, trial_recipe, trial_resources

        loggers(sweep)  # refused now rather than after the teachers' pass
        room = trial_resources(recipe, sweep)
        for warning in lost_gpus_of_trials(recipe, sweep, room, alive()):
            reporter.emit(LogMessage(warning, warning=True))
        recipe = _with_precisions(recipe, directory, room.gpus, reporter)
        _require_shared(recipe, directory)
        with _teachers(recipe, room.in_own_process, reporter) as backend:
            try:
                trained = trial_recipe(recipe, room)
                search(
                    TrialContext(trained, directory / _TRIALS, backend),
                    space,
                    sweep,
                    directory / "search",
                    room,
                    reporter,
                )
                winner = _note_winner(recipe, directory)
                if winner is not None and sweep.final_runs.seeds:
                    context = TrialContext(trained, directory / _WINNERS, backend, keep_models=True)
                    train_all(context, _with_seeds(winner, sweep), sweep, directory / "finals", room, reporter)
            except StoppedError:
                interrupted = True
    trials, winner = read_trials(directory / _TRIALS), _note_winner(recipe, directory)
    write_tables(trials, directory)
    if winner is not None and not interrupted:
        winners = read_trials(directory / _WINNERS)
        evaluation = measure(recipe, winners, directory / _WINNERS, reporter)
        if evaluation is not None:
            evaluation.write(directory / "evaluation.json")
    return SweepResult(recipe, sweep, directory, trials, winner, winners, evaluation, interrupted)


def _with_precisions(
    recipe: Recipe | MutualRecipe, directory: Path, gpus: float, reporter: Reporter
) -> Recipe | MutualRecipe:
    """The recipe with the precisions that all trials share, kept for a resumed sweep."""
    asked = recipe
    if isinstance(recipe, MutualRecipe):
        recipe = mutual_roles.with_precisions(recipe, reporter, gpus)
    else:
        recipe = student_roles.with_precisions(recipe, reporter, gpus)
    if recipe != asked:
        write_recipe(directory / "recipe.yaml", recipe)
    return recipe


def _require_shared(recipe: Recipe | MutualRecipe, directory: Path) -> None:
    """Trials are put on any node: one that does not see the sweep's folders is refused before any work."""
    from distcse.ray_backend.shared_storage import require_shared

    written = {"storage.runs": directory}
    if isinstance(recipe, Recipe):
        check_storage(recipe.storage, ["cache"])
        written["storage.cache"] = resolve_path(recipe.storage.cache)
    read = read_by_workers(recipe) if isinstance(recipe, Recipe) else read_by_groups(recipe)
    require_shared(written, read, [None])


@contextmanager
def _teachers(recipe: Recipe | MutualRecipe, in_own_process: bool, reporter: Reporter) -> Iterator[SweepBackend | None]:
    """Tables built once and servers, as trials ask for them, started once, for all trials."""
    if isinstance(recipe, MutualRecipe):
        yield None
        return
    from distcse.teachers.servers import served

    text = PreparedCorpus.prepare(recipe, reporter)
    _ = text.start  # a student that does not load is told once, not by every trial
    tables = text.tables(RayBackend(), reporter)
    text.neighbours(tables, reporter)  # found here once rather than by all trials at a time
    section = recipe.teachers
    asked = [number for number, table in enumerate(tables) if table is None or not in_own_process]
    with served(section, text.corpus, tables, reporter, asked) as servers:
        yield SweepBackend(servers, in_own_process)


def _note_winner(recipe: Recipe | MutualRecipe, directory: Path) -> Trial | None:
    winner = winner_of(read_trials(directory / _TRIALS))
    if winner is not None:
        write_text_atomic(directory / "best.yaml", recipe_yaml(with_values(recipe, winner.values)))
    return winner


def _with_seeds(winner: Trial, sweep: Sweep) -> list[dict[str, Any]]:
    """The winner's values with each seed, and the recipe's own."""
    ours = [{**winner.values, "seed": seed} for seed in sweep.final_runs.seeds]
    return ours + [{"seed": seed} for seed in sweep.final_runs.seeds if sweep.final_runs.compare]
