"""Evaluates the models of a sweep's final runs on the test sets, which the search does not read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from distcse.device import default_device
from distcse.evaluation import (
    LoadOptions,
    ModelResults,
    Tasks,
    measure_model,
    open_candidate,
    reporting,
)
from distcse.events import Reporter
from distcse.experiments.backend import Backend, DeviceCall
from distcse.experiments.devices import model_memory
from distcse.experiments.stoppable_evaluation import FinalScores, compare_measured, measure_models, stoppable
from distcse.experiments.trials import Trials
from distcse.placement.devices import DeviceOptions
from distcse.recipe import TrainedSection
from distcse.recipe.resources import GpuMode
from distcse.storage import ArtifactStore, open_store
from distcse.tuning.records import Trial
from distcse.tuning.summary import BEST, variant_of


@stoppable
def measure(
    trials: Trials,
    runs: Sequence[Trial],
    folder: ArtifactStore,
    gpu_mode: GpuMode,
    backend: Backend,
    reporter: Reporter,
) -> FinalScores:
    """Evaluate the models of the final runs on the test sets, and write each model's overlap with its training text.

    A stop request leaves models out, and a resumed sweep measures them.

    Args:
        trials: What the experiment knows of its trials.
        runs: The final runs.
        folder: The folder with the runs' folders.
        gpu_mode: Whether GPUs may be used: `resources.gpu`.
        backend: Where the models are evaluated, one after the other on each device.
        reporter: Receives progress.

    Returns:
        The scores of the models that were measured; none without test sets or models.
    """
    started_at = time.perf_counter()
    tasks = trials.labelled_tasks()
    if not tasks.tasks:
        return FinalScores(None)
    precision = trials.evaluation_precision
    found: list[tuple[str, Path, TrainedSection]] = []
    for run in sorted(runs, key=lambda run: (variant_of(run) == BEST, run.values["seed"])):
        title, run_folder = f"{variant_of(run)}, seed {run.values['seed']}", (folder / run.name).path
        models = {
            name: model for name, model in trials.models(run_folder).items() if open_store(model[0]).fetch_folder()
        }
        if not models:
            continue
        contamination = trials.contamination(run_folder, tasks, reporter)
        for name, (model, section) in models.items():
            contamination.write(open_store(model, folder.guard))
            found.append((f"{title}, {name}" if name else title, model, section))
    if not found:
        return FinalScores(None)
    shared = backend.share(tasks)
    calls = [
        DeviceCall(
            f"evaluation of {name}",
            partial(_measure, name, open_store(model), str(model), section, precision, shared),
            model_memory(str(model)),
        )
        for name, model, section in found
    ]
    options = DeviceOptions(written={"storage.runs": folder.path}, uses_gpu=gpu_mode != "none")
    determined_by = [precision, *(str(model) for _, model, _ in found)]
    returned = measure_models(calls, tasks, determined_by, folder, backend, options, reporter)
    results: list[ModelResults] = [model for model in returned if model is not None]
    devices = ", ".join(sorted({model.device for model in results}))
    settings = {"STS": "all", "device": devices, "precision": precision}
    return compare_measured(results, tasks, calls, returned, settings, started_at)


def _measure(
    name: str,
    model: ArtifactStore,
    source: str,
    section: TrainedSection,
    precision: str,
    shared: Callable[[], Tasks],
    reporter: Reporter,
) -> ModelResults:
    model.fetch_folder()
    options = LoadOptions(
        device=default_device(),
        precision=precision,
        trust_remote_code=section.trust_remote_code,
        is_fast=section.is_fast,
    )
    candidate = open_candidate(name, str(model.path), options, reporting(reporter, name))
    candidate = replace(candidate, info=replace(candidate.info, source=source))
    return measure_model(candidate, shared(), reporter)
