"""Evaluates the models of a sweep's final runs on the test sets, which the search does not read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distcse.device import default_device
from distcse.evaluation import Contamination, Evaluation, LoadOptions, Tasks, evaluate, open_candidate
from distcse.events import Reporter
from distcse.experiments.distillation.dev_metric import check_labelled_data
from distcse.experiments.distillation.final_evaluation import contamination_of, labelled_tasks
from distcse.experiments.distillation.preparation import read_corpus
from distcse.experiments.mutual.final_evaluation import checked_tasks, wanted_tasks
from distcse.experiments.mutual.pairs import Pairs
from distcse.recipe import MutualRecipe, Recipe, TrainedSection, decided
from distcse.storage import fetch_folder
from distcse.tuning.records import Trial
from distcse.tuning.summary import BEST, variant_of


def check_labels(recipe: Recipe | MutualRecipe) -> None:
    """Check the dev and test sets before the trials start.

    Raises:
        EvaluationError: A set is missing, malformed or has too few labels.
    """
    if isinstance(recipe, MutualRecipe):
        checked_tasks(recipe)
    else:
        check_labelled_data(recipe)
        labelled_tasks(recipe)


def measure(
    recipe: Recipe | MutualRecipe, runs: Sequence[Trial], folder: Path, reporter: Reporter
) -> Evaluation | None:
    """Evaluate the models of the final runs on the test sets, and write each model's overlap with its training text.

    Args:
        recipe: The sweep's recipe.
        runs: The final runs.
        folder: The folder with the runs' folders.
        reporter: Receives progress.

    Returns:
        The evaluation; None without test sets or models.
    """
    tasks = _tasks(recipe)
    if not tasks.tasks:
        return None
    device, precision = default_device(), decided(recipe.evaluation.precision)
    shared = None if isinstance(recipe, MutualRecipe) else _corpus_contamination(recipe, tasks, reporter)
    found: list[tuple[str, Path, bool]] = []
    for run in sorted(runs, key=lambda run: (variant_of(run) == BEST, run.values["seed"])):
        name, run_folder = f"{variant_of(run)}, seed {run.values['seed']}", folder / run.name
        models = {key: model for key, model in _models(recipe, name, run_folder).items() if fetch_folder(model[0])}
        contamination = shared or (_pairs_contamination(run_folder, tasks) if models else None)
        for key, (model, section) in models.items():
            assert contamination is not None
            contamination.write(model)
            found.append((key, model, section.trust_remote_code))
    if not found:
        return None
    # A generator, so that only one model is in memory: those of all seeds and groups may not fit on the device.
    candidates = (
        open_candidate(name, str(model), LoadOptions(device=device, precision=precision, trust_remote_code=trusted))
        for name, model, trusted in found
    )
    settings = {"STS": "all", "device": device, "precision": precision}
    return evaluate(candidates, tasks, settings=settings, emit=reporter.emit)


def _models(recipe: Recipe | MutualRecipe, name: str, run: Path) -> dict[str, tuple[Path, TrainedSection]]:
    """Return the path and the recipe section of a run's models, by their names in tables."""
    if isinstance(recipe, Recipe):
        return {name: (run / "model", recipe.student)}
    return {
        f"{name}, {group.name} {kind}": (run / "models" / group.name / kind, group)
        for group in recipe.groups
        for kind in ("bi", "cross")
    }


def _tasks(recipe: Recipe | MutualRecipe) -> Tasks:
    return wanted_tasks(recipe) if isinstance(recipe, MutualRecipe) else labelled_tasks(recipe)


def _corpus_contamination(recipe: Recipe, tasks: Tasks, reporter: Reporter) -> Contamination:
    return contamination_of(recipe, read_corpus(recipe, reporter), tasks, reporter.emit)


def _pairs_contamination(run: Path, tasks: Tasks) -> Contamination:
    pairs = Pairs.read(run / "pairs.parquet")
    return Contamination.measure((*pairs.first, *pairs.second), [task.sentences() for task in tasks.tasks])
