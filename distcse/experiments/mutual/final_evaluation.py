"""Final evaluation of a mutual distillation: initial models, bi-encoders, cross-encoders and their ensembles.

The test sets may overlap with the training pairs; such scores are marked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from distcse.data import Pairs
from distcse.device import default_device
from distcse.evaluation import (
    SUITES,
    Candidate,
    Contamination,
    Ensemble,
    EvalConfig,
    ModelInfo,
    ModelResults,
    RecordedScores,
    Tasks,
    collect,
    make_candidate,
    make_pair_candidate,
    measure_model,
    refuse_test_as_dev,
)
from distcse.events import Reporter, StageProgress
from distcse.experiments.backend import Backend, DeviceCall
from distcse.experiments.devices import model_memory
from distcse.experiments.mutual.dev_pairs import DevPairs
from distcse.experiments.mutual.devices import device_options
from distcse.experiments.mutual.phases import Kind
from distcse.experiments.mutual.result import Best
from distcse.experiments.stoppable_evaluation import FinalScores, compare_measured, measure_models
from distcse.models import CrossEncoder, Encoder, resolve_model
from distcse.recipe import GroupSection, MutualRecipe, decided
from distcse.runs.directory import RunDirectory
from distcse.storage import ArtifactStore, open_store


def wanted_tasks(recipe: MutualRecipe) -> Tasks:
    """Read the labelled sets of the final evaluation; empty without labelled data.

    Raises:
        EvaluationFormatError: A set is malformed.
    """
    selected = recipe.evaluation.final_suites
    if selected is None:
        selected = ["sts"] if recipe.evaluation.data else []
    suites = [suite for suite in SUITES if suite in selected]
    return collect(Path(str(recipe.evaluation.data)), suites, [], EvalConfig()) if suites else Tasks()


def checked_tasks(recipe: MutualRecipe) -> Tasks:
    """Read the labelled sets and the dev set, and check that they don't overlap unless evaluation.dev_is_test allows it.

    Raises:
        EvaluationError: A set is missing or malformed, or a model's record of contamination cannot be read.
        DistcseError: The dev set is also a test set.
    """
    tasks, dev = wanted_tasks(recipe), DevPairs.of(recipe)
    if dev is not None:
        refuse_test_as_dev(dev.first, dev.second, tasks, recipe.evaluation.dev_is_test)
    for group in recipe.groups if tasks.tasks else []:
        if Path(group.backbone).is_dir():
            Contamination.read(resolve_model(group.backbone))
    return tasks


def final_scores(
    recipe: MutualRecipe,
    tasks: Tasks,
    pairs: Pairs,
    best: Sequence[Best],
    run: RunDirectory,
    backend: Backend,
    reporter: Reporter,
) -> FinalScores:
    """Evaluate each group's initial and best models, and the ensemble of all groups for each formulation.

    Each model is evaluated on one of the backend's devices. Test sentences that were among the training pairs are recorded in
    the models' folders. Scores on such sets are transductive, and marked so in tables and model cards. A stop request leaves
    models out, with the ensembles that need them, and a resumed run measures them.

    Args:
        recipe: The run's recipe.
        tasks: The labelled sets to evaluate on.
        pairs: The pairs that the models were trained on.
        best: The best models.
        run: The run's folder.
        backend: Where the models are evaluated.
        reporter: Receives progress.

    Returns:
        The scores of the models that were measured; none without labelled sets.
    """
    started_at = time.perf_counter()
    contamination = Contamination.measure(pairs.distinct(), [task.sentences() for task in tasks.tasks])
    for model in best:
        contamination.write(model.model)
    if not tasks.tasks:
        return FinalScores(None)
    note = f"compared with {len(tasks.tasks)} sets: {contamination.describe}"
    reporter.emit(StageProgress("contamination", len(pairs), len(pairs), "pairs", finished=True, note=note))
    precision, finished = decided(recipe.evaluation.precision), {model.group for model in best}
    groups = {group.name: group for group in recipe.groups if group.name in finished}
    shared = backend.share((tasks, contamination))
    calls = [
        DeviceCall(
            f"evaluation of {name} start",
            partial(_measure_start, group, precision, shared),
            model_memory(group.backbone),
        )
        for name, group in groups.items()
    ]
    by_kind = sorted(best, key=lambda model: model.kind)  # bi-encoders first
    calls += [
        DeviceCall(
            f"evaluation of {model.group} {model.kind}",
            partial(
                _measure_best,
                groups[model.group],
                model.kind,
                open_store(model.model),
                str(model.model),
                precision,
                shared,
            ),
            model_memory(str(model.model)),
        )
        for model in by_kind
    ]
    options = device_options(recipe, list(groups.values()), {"storage.runs": run.path})
    returned = measure_models(calls, tasks, [precision], run.store, backend, options, reporter)
    measured = [None if model is None else _Measured(*model) for model in returned]
    results = [model.results for model in measured[: len(groups)] if model is not None]
    trained = measured[len(groups) :]
    for kind in ("bi", "cross"):
        of_kind = [scored for model, scored in zip(by_kind, trained, strict=True) if model.kind == kind]
        members = [scored for scored in of_kind if scored is not None]
        results += [member.results for member in members]
        if len(members) == len(of_kind) > 1:
            info = ModelInfo(f"{kind} ensemble", "mean of predictions", f"{kind}-encoders", "pair", 0, 0)
            ensemble = Ensemble([member.scores for member in members])
            results.append(measure_model(Candidate(info, ensemble, contamination), tasks, reporter.emit))
    devices = ", ".join(sorted({model.results.device for model in measured if model is not None}))
    settings = {"STS": "all", "device": devices, "precision": precision}
    return compare_measured(results, tasks, calls, returned, settings, started_at)


class _Measured(NamedTuple):
    """What the evaluation of one model returns."""

    results: ModelResults
    scores: RecordedScores
    """Similarities of the tasks' pairs, for the ensemble; none for an initial model."""


def _measure_start(
    group: GroupSection, precision: str, shared: Callable[[], tuple[Tasks, Contamination]], reporter: Reporter
) -> _Measured:
    tasks, _ = shared()
    encoder = Encoder.from_section(group).to(default_device())
    known = Contamination.read(resolve_model(group.backbone))
    candidate = make_candidate(f"{group.name} start", group.backbone, encoder, known, precision)
    return _Measured(measure_model(candidate, tasks, reporter.emit, reporter.stop_requested), RecordedScores())


def _measure_best(
    group: GroupSection,
    kind: Kind,
    model: ArtifactStore,
    source: str,
    precision: str,
    shared: Callable[[], tuple[Tasks, Contamination]],
    reporter: Reporter,
) -> _Measured:
    model.fetch_folder()
    tasks, contamination = shared()
    title, device = f"{group.name} {kind}", default_device()
    if kind == "bi":
        encoder = Encoder.load(model.path, is_fast=group.is_fast, trust_remote_code=group.trust_remote_code)
        candidate = make_candidate(title, source, encoder.to(device), contamination, precision)
    else:
        scorer = CrossEncoder.load(model.path, None, group.trust_remote_code, group.is_fast)
        candidate = make_pair_candidate(title, source, scorer.to(device), contamination, precision)
    results, scores = measure_model(candidate, tasks, reporter.emit, reporter.stop_requested), RecordedScores()
    for task in tasks.tasks:
        if task.pairs_only:
            task.measure(scores.recording(candidate.model))
    return _Measured(results, scores)
