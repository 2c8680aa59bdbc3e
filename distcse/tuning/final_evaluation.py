"""The end of a sweep: the models of the runs at its end on the test sets, which nothing before has read."""

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
from distcse.tuning.summary import BEST, side_of


def check_labels(recipe: Recipe | MutualRecipe) -> None:
    """Read dev and test sets: better refused now than after all trials."""
    if isinstance(recipe, MutualRecipe):
        checked_tasks(recipe)
    else:
        check_labelled_data(recipe)
        labelled_tasks(recipe)


def measure(
    recipe: Recipe | MutualRecipe, runs: Sequence[Trial], folder: Path, reporter: Reporter
) -> Evaluation | None:
    """The models of runs, and which test sentences they were trained on; None where there is nothing to measure.

    Args:
        recipe: The sweep's recipe.
        runs: The runs at the end.
        folder: Where their folders are.
        reporter: Receives progress.
    """
    tasks = _tasks(recipe)
    if not tasks.tasks:
        return None
    device, precision = default_device(), decided(recipe.evaluation.precision)
    of_all = None if isinstance(recipe, MutualRecipe) else _of_the_corpus(recipe, tasks, reporter)
    found: list[tuple[str, Path, bool]] = []
    for run in sorted(runs, key=lambda run: (side_of(run) == BEST, run.values["seed"])):
        name, place = f"{side_of(run)}, seed {run.values['seed']}", folder / run.name
        models = {key: its for key, its in _models(recipe, name, place).items() if fetch_folder(its[0])}
        exposure = of_all or (_of_pairs(place, tasks) if models else None)
        for key, (model, section) in models.items():
            assert exposure is not None
            exposure.write(model)
            found.append((key, model, section.trust_remote_code))
    if not found:
        return None
    # Each is opened when those before it are measured: three seeds of groups of large models fit no device together.
    candidates = (
        open_candidate(name, str(model), LoadOptions(device=device, precision=precision, trust_remote_code=trusted))
        for name, model, trusted in found
    )
    settings = {"STS": "all", "device": device, "precision": precision}
    return evaluate(candidates, tasks, settings=settings, post=reporter.emit)


def _models(recipe: Recipe | MutualRecipe, name: str, run: Path) -> dict[str, tuple[Path, TrainedSection]]:
    """Where a run's models are, and what they began as, by the names that they have in tables."""
    if isinstance(recipe, Recipe):
        return {name: (run / "model", recipe.student)}
    return {
        f"{name}, {group.name} {kind}": (run / "models" / group.name / kind, group)
        for group in recipe.groups
        for kind in ("bi", "cross")
    }


def _tasks(recipe: Recipe | MutualRecipe) -> Tasks:
    return wanted_tasks(recipe) if isinstance(recipe, MutualRecipe) else labelled_tasks(recipe)


def _of_the_corpus(recipe: Recipe, tasks: Tasks, reporter: Reporter) -> Contamination:
    return contamination_of(recipe, read_corpus(recipe, reporter), tasks, reporter.emit)


def _of_pairs(run: Path, tasks: Tasks) -> Contamination:
    pairs = Pairs.read(run / "pairs.parquet")
    return Contamination.measure((*pairs.first, *pairs.second), [task.sentences() for task in tasks.tasks])
