"""Evaluates the models of a sweep's final runs on the test sets, which the search does not read, and summarizes their scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from distcse.devices.device import default_device
from distcse.devices.device_plan import DeviceOptions
from distcse.devices.gpu_plan import GpuMode
from distcse.evaluation import (
    Evaluation,
    LoadOptions,
    ModelResults,
    Tasks,
    measure_model,
    open_candidate,
    reporting,
)
from distcse.evaluation.results import Spread, compute_spread, compute_spreads
from distcse.events import Reporter
from distcse.recipe import TrainedSection, decided
from distcse.runs.backend import Backend, DeviceCall
from distcse.runs.cluster_fit import model_memory
from distcse.runs.experiment import Trials
from distcse.runs.final_evaluation import FinalScores, compare_measured, measure_models, stoppable
from distcse.storage import ArtifactStore
from distcse.tuning.records import Trial

RECIPE, BEST = "recipe", "best"


@dataclass(frozen=True)
class SummaryRow:
    """Scores on one set, or an average over sets."""

    suite: str
    set: str
    measure: str
    spreads: dict[str, Spread]
    """By model: `recipe` and `best`; in a mutual distillation, each of their encoders."""
    seen: float = 0.0
    """Largest fraction of the set's sentences in a model's training text."""


def variant_of(run: Trial) -> str:
    """Return `best` for a final run with the best trial's values, `recipe` for one with the original recipe's values."""
    return RECIPE if run.values.keys() == {"seed"} else BEST


def dev_row(runs: Sequence[Trial]) -> SummaryRow | None:
    """Summarize the final runs' best dev scores; None if there are none. A run that reuses another's scores is left out."""
    scores: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: variant_of(run) == BEST):
        if run.best is not None and run.status == "finished" and not run.reused_from:
            scores.setdefault(variant_of(run), []).append(run.best.score)
    found = {side: compute_spread(values) for side, values in scores.items()}
    return SummaryRow("dev", "best of each run", "dev", found) if found else None


def set_rows(evaluation: Evaluation) -> list[SummaryRow]:
    """Summarize every score over the models' seeds; of STS only the aggregate in the evaluation's settings."""
    aggregate = evaluation.settings.get("STS", "all")
    return [
        SummaryRow(
            score.suite,
            score.set,
            score.measure,
            compute_spreads(score),
            max(evaluation.overlap_fraction(score, model) for model in score.values),
        )
        for score in evaluation.scores
        if score.suite != "sts" or score.measure == aggregate
    ]


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
    """
    started_at = time.perf_counter()
    tasks = trials.labelled_tasks()
    if not tasks.tasks:
        return FinalScores(None)
    precision = decided(trials.searched.evaluation.precision)
    found: list[tuple[str, ArtifactStore, TrainedSection]] = []
    for run in sorted(runs, key=lambda run: (variant_of(run) == BEST, run.values["seed"])):
        title, run_folder = f"{variant_of(run)}, seed {run.values['seed']}", folder / run.name
        models = {name: model for name, model in trials.models(run_folder).items() if model[0].fetch_folder()}
        if not models:
            continue
        contamination = trials.contamination(run_folder, tasks, reporter)
        for name, (model, section) in models.items():
            contamination.write(model)
            found.append((f"{title}, {name}" if name else title, model, section))
    if not found:
        return FinalScores(None)
    shared = backend.share(tasks)
    calls = [
        DeviceCall(
            f"evaluation of {name}",
            partial(_measure, name, model, section, precision, shared),
            model_memory(str(model.path)),
        )
        for name, model, section in found
    ]
    options = DeviceOptions(written={"storage.runs": folder.path}, uses_gpu=gpu_mode != "none")
    determined_by = [precision, *(str(model) for _, model, _ in found)]
    returned = measure_models(calls, tasks, determined_by, folder, backend, options, reporter)
    results: list[ModelResults] = [model for model in returned if model is not None]
    return compare_measured(results, tasks, calls, returned, precision, started_at)


def _measure(
    name: str,
    model: ArtifactStore,
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
    )
    candidate = open_candidate(name, str(model.path), options, reporting(reporter, name))
    candidate = replace(candidate, info=replace(candidate.info, source=str(model)))
    return measure_model(candidate, shared(), reporter)
