"""Evaluates the models of a sweep's final runs on the test sets, which the search does not read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distcse.device import default_device
from distcse.evaluation import Evaluation, LoadOptions, evaluate, open_candidate
from distcse.events import Reporter
from distcse.experiments.trials import Trials
from distcse.recipe import TrainedSection
from distcse.storage import open_store
from distcse.tuning.records import Trial
from distcse.tuning.summary import BEST, variant_of


def measure(trials: Trials, runs: Sequence[Trial], folder: Path, reporter: Reporter) -> Evaluation | None:
    """Evaluate the models of the final runs on the test sets, and write each model's overlap with its training text.

    Args:
        trials: What the experiment knows of its trials.
        runs: The final runs.
        folder: The folder with the runs' folders.
        reporter: Receives progress.

    Returns:
        The evaluation; None without test sets or models.
    """
    tasks = trials.labelled_tasks()
    if not tasks.tasks:
        return None
    device, precision = default_device(), trials.evaluation_precision
    found: list[tuple[str, Path, TrainedSection]] = []
    for run in sorted(runs, key=lambda run: (variant_of(run) == BEST, run.values["seed"])):
        title, run_folder = f"{variant_of(run)}, seed {run.values['seed']}", folder / run.name
        models = {
            name: model for name, model in trials.models(run_folder).items() if open_store(model[0]).fetch_folder()
        }
        if not models:
            continue
        contamination = trials.contamination(run_folder, tasks, reporter)
        for name, (model, section) in models.items():
            contamination.write(model)
            found.append((f"{title}, {name}" if name else title, model, section))
    if not found:
        return None
    # A generator, so that only one model is in memory: those of all seeds and groups may not fit on the device.
    candidates = (
        open_candidate(
            name,
            str(model),
            LoadOptions(
                device=device,
                precision=precision,
                trust_remote_code=section.trust_remote_code,
                is_fast=section.is_fast,
            ),
        )
        for name, model, section in found
    )
    settings = {"STS": "all", "device": device, "precision": precision}
    return evaluate(candidates, tasks, settings=settings, emit=reporter.emit)
