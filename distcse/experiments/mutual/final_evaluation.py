"""Final evaluation of a mutual distillation: initial models, bi-encoders, cross-encoders and their ensembles.

The test sets may overlap with the training pairs; such scores are marked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from distcse.data import Pairs
from distcse.device import default_device
from distcse.evaluation import (
    MIN_TEXTS,
    SUITES,
    Candidate,
    Contamination,
    ModelResults,
    RecordedScores,
    Tasks,
    TextsTask,
    collect,
    make_candidate,
    measure_ensemble,
    measure_model,
    refuse_test_as_dev,
    reporting,
)
from distcse.events import Reporter, StageProgress
from distcse.experiments.backend import Backend, DeviceCall
from distcse.experiments.devices import model_memory
from distcse.experiments.mutual.dev_pairs import DevPairs
from distcse.experiments.mutual.devices import device_options
from distcse.experiments.mutual.phase_store import PhaseStore
from distcse.experiments.mutual.phases import Kind, Phase, last_phase
from distcse.experiments.mutual.result import Best
from distcse.experiments.stoppable_evaluation import FinalScores, compare_measured, measure_models, stoppable
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import KINDS, GroupSection, MutualRecipe, decided
from distcse.runs.directory import RunDirectory
from distcse.storage import ArtifactStore, open_store

_COMPARED_TEXTS = 1000
_Seen = Mapping[tuple[str, Kind], Contamination]
"""By group and kind: which sentences of the labelled sets its trained models have seen."""


def wanted_tasks(recipe: MutualRecipe) -> Tasks:
    """Read the labelled sets of the final evaluation; empty without labelled data.

    Raises:
        EvaluationFormatError: A set is malformed.
    """
    selected = recipe.evaluation.final_suites
    if selected is None:
        selected = ["sts"] if recipe.evaluation.data else []
    suites = [suite for suite in SUITES if suite in selected]
    return collect(Path(str(recipe.evaluation.data)), suites, []) if suites else Tasks()


def checked_tasks(recipe: MutualRecipe) -> Tasks:
    """Read the labelled sets and the dev set, and check that they don't overlap unless evaluation.dev_is_test allows it.

    Raises:
        EvaluationError: A set is missing or malformed, or a model's record of contamination cannot be read.
        DistcseError: The dev set is also a test set.
    """
    tasks, dev = wanted_tasks(recipe), DevPairs.of(recipe)
    if dev is not None:
        refuse_test_as_dev(dev.first, dev.second, tasks, recipe.evaluation.dev_is_test)
    for start in {start for group in recipe.groups for starts in _starts(recipe, group).values() for start in starts}:
        if Path(start).is_dir():
            Contamination.of_model(start)
    return tasks


def contamination_of(recipe: MutualRecipe, pairs: Pairs, tasks: Tasks, reporter: Reporter) -> Contamination:
    """Find the sentences of test and dev sets that are among the training pairs."""
    dev = DevPairs.of(recipe)
    sets = [task.sentences() for task in tasks.tasks if not isinstance(task, TextsTask)]  # its texts are the pairs'
    sentences = reporter.follow(pairs.distinct(), "contamination")
    return Contamination.measure(sentences, [*sets, *([] if dev is None else [[*dev.first, *dev.second]])])


def _starts(recipe: MutualRecipe, group: GroupSection) -> dict[Kind, set[str]]:
    """Return the models whose training text a group's trained models have seen, by kind."""
    bi, cross = group.backbone, recipe.cross_start(group)
    if recipe.mutual.initialization == "sequential":
        return {"bi": {bi, cross}, "cross": {bi, cross}}
    return {"bi": {bi}, "cross": {cross}}


def unlabelled_tasks(recipe: MutualRecipe, pairs: Pairs, reference: str) -> Tasks:
    """Return what is measured without labelled sets: the dev pairs, and how far the bi-encoders have moved on the run's texts.

    Args:
        recipe: The run's recipe.
        pairs: The training pairs. Up to 1,000 of their sentences are compared, evenly spaced.
        reference: Name of the model that the others are compared with on these sentences.
    """
    found, dev = Tasks(), DevPairs.of(recipe)
    if dev is not None:
        found.tasks += dev.tasks
        found.warnings.append(
            f"checkpoints and cycles were chosen by {dev.name}, so its scores favor the trained models; set evaluation.data to "
            "measure on other sets"
        )
    step = -(-len(pairs.sentences) // _COMPARED_TEXTS)
    texts = list(dict.fromkeys(pairs.sentences.texts(range(0, len(pairs.sentences), step))))
    if len(texts) >= MIN_TEXTS:
        # Bi-encoders only: the thousands of pairs would take cross-encoders minutes.
        name = f"{len(texts):,} of the pairs' sentences, with {reference}"
        found.tasks.append(TextsTask(name, texts, reference, pairs_only=False))
    return found


@stoppable
def final_scores(
    recipe: MutualRecipe,
    tasks: Tasks,
    pairs: Pairs,
    best: Sequence[Best],
    run: RunDirectory,
    backend: Backend,
    reporter: Reporter,
) -> FinalScores:
    """Evaluate each group's initial and best models, with evaluation.final_cycles also those of each cycle, and their ensembles.

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
        The scores of the models that were measured; none if the recipe selects no suite.
    """
    started_at = time.perf_counter()
    finished = {model.group for model in best}
    groups = {group.name: group for group in recipe.groups if group.name in finished}
    if recipe.evaluation.final_suites is None and not tasks.tasks and groups:
        tasks = unlabelled_tasks(recipe, pairs, _start_name(next(iter(groups))))
    contamination = contamination_of(recipe, pairs, tasks, reporter)
    seen = {
        (name, kind): Contamination.of_several([contamination, *map(Contamination.of_model, starts)])
        for name, group in groups.items()
        for kind, starts in _starts(recipe, group).items()
    }
    for model in best:
        start = groups[model.group].backbone
        found = Contamination.of_model(start) if model.is_start else seen[model.group, model.kind]
        found.write(open_store(model.model, run.store.guard))
    if not tasks.tasks:
        return FinalScores(None)
    if number := len(contamination.overlap):
        key = "pairs.mine.corpus.exclude_evaluation" if recipe.pairs.mine else None
        note = f"compared with {number} labelled set{'s' * (number > 1)}: {contamination.describe(key)}"
        reporter.emit(StageProgress("contamination", len(pairs), len(pairs), "pairs", finished=True, note=note))
    precision = decided(recipe.evaluation.precision)
    tasks = replace(tasks, timed_texts=tasks.first_sentences())
    shared = backend.share((tasks, seen))
    rows = [_start_rows(groups, precision, shared)]
    for kind in KINDS:
        of_kind = [model for model in best if model.kind == kind]
        folders, starts = {model.group: model.model for model in of_kind}, {m.group for m in of_kind if m.is_start}
        rows.append(_trained_rows(kind, "", groups, folders, precision, shared, starts))
    if recipe.evaluation.final_cycles == "all":
        rows += [
            _trained_rows(phase.kind, f", cycle {phase.cycle}", groups, folders, precision, shared)
            for phase, folders in _models_by_phase(recipe, run, list(groups)).items()
        ]
    calls = [call for row in rows for call in row.calls]
    options = device_options(recipe, list(groups.values()), {"storage.runs": run.path})
    returned = measure_models(calls, tasks, [precision], run.store, backend, options, reporter)
    measured = iter([None if model is None else _Measured(*model) for model in returned])
    results: list[ModelResults] = []
    for row in rows:
        members = [model for model in islice(measured, len(row.calls)) if model is not None]
        results += [member.results for member in members]
        if len(members) == len(row.calls) > 1:
            scores = [member.scores for member in members]
            measurements = [member.results for member in members]
            results.append(measure_ensemble(row.ensemble, measurements, scores, tasks, reporter.emit))
    devices = ", ".join(sorted({model.device for model in results}))
    settings = {"STS": "all", "device": devices, "precision": precision}
    return compare_measured(results, tasks, calls, returned, settings, started_at)


class _Rows(NamedTuple):
    """Models of one kind, one per group, whose rows stand next to that of their ensemble."""

    ensemble: str
    """Name of the ensemble in tables."""
    calls: list[DeviceCall[_Measured]]


class _Measured(NamedTuple):
    """What the evaluation of one model returns."""

    results: ModelResults
    scores: RecordedScores
    """Similarities of the tasks' pairs, for the ensemble."""


def _start_rows(groups: Mapping[str, GroupSection], precision: str, shared: Callable[[], tuple[Tasks, _Seen]]) -> _Rows:
    """Return the rows of the groups' initial models."""
    return _Rows(
        "start ensemble",
        [
            DeviceCall(
                f"evaluation of {_start_name(name)}",
                partial(_measure_start, group, precision, shared),
                model_memory(group.backbone),
            )
            for name, group in groups.items()
        ],
    )


def _trained_rows(
    kind: Kind,
    suffix: str,
    groups: Mapping[str, GroupSection],
    folders: Mapping[str, Path],
    precision: str,
    shared: Callable[[], tuple[Tasks, _Seen]],
    starts: Collection[str] = (),
) -> _Rows:
    """Return the rows of trained models of one kind.

    Args:
        kind: The formulation.
        suffix: The end of the rows' names.
        groups: The groups, by name.
        folders: The folder of each group's model.
        precision: Precision of the forward passes.
        shared: Returns the labelled sets, and what the trained models have seen of them.
        starts: Groups whose model is their start, which has not seen the pairs.
    """
    return _Rows(
        f"{kind} ensemble{suffix}",
        [
            DeviceCall(
                f"evaluation of {name} {kind}{suffix}",
                partial(
                    _measure_trained,
                    f"{name} {kind}{suffix}",
                    groups[name],
                    kind,
                    open_store(folder),
                    str(folder),
                    precision,
                    shared,
                    is_timed=not suffix,
                    is_start=name in starts,
                ),
                model_memory(str(folder)),
            )
            for name, folder in folders.items()
        ],
    )


def _models_by_phase(recipe: MutualRecipe, run: RunDirectory, groups: Sequence[str]) -> dict[Phase, dict[str, Path]]:
    """Return the folders of the models that each phase of a run trained, by group."""
    store, last = PhaseStore(run.path), last_phase(recipe.mutual.cycles)
    phases = [phase for number in range(1, last.number + 1) if store.posted(phase := Phase(number))]
    return {
        phase: {
            name: run.path / "groups" / name / phase.name / "model" for name in groups if name in store.posted(phase)
        }
        for phase in phases
    }


def _start_name(group: str) -> str:
    return f"{group} start"


def _measure_start(
    group: GroupSection, precision: str, shared: Callable[[], tuple[Tasks, _Seen]], reporter: Reporter
) -> _Measured:
    tasks = replace(shared()[0], timed_texts=[])  # as large and as fast as the trained bi-encoder
    encoder = Encoder.from_section(group).to(default_device())
    known = Contamination.of_model(group.backbone)
    name = _start_name(group.name)
    candidate = make_candidate(name, group.backbone, encoder, known, precision, reporting(reporter, name))
    return _measure(candidate, tasks, reporter)


def _measure_trained(
    title: str,
    group: GroupSection,
    kind: Kind,
    model: ArtifactStore,
    source: str,
    precision: str,
    shared: Callable[[], tuple[Tasks, _Seen]],
    reporter: Reporter,
    is_timed: bool,
    is_start: bool,
) -> _Measured:
    model.fetch_folder()
    tasks, seen = shared()
    contamination = Contamination.read(model.path) if is_start else seen[group.name, kind]
    tasks = tasks if is_timed else replace(tasks, timed_texts=[])
    encoder: Encoder | CrossEncoder
    if kind == "bi":
        encoder = Encoder.load(model.path, is_fast=group.is_fast, trust_remote_code=group.trust_remote_code)
    else:
        encoder = CrossEncoder.load(model.path, None, group.trust_remote_code, group.is_fast)
    on_device, progress = encoder.to(default_device()), reporting(reporter, title)
    candidate = make_candidate(title, source, on_device, contamination, precision, progress)
    return _measure(candidate, tasks, reporter)


def _measure(candidate: Candidate, tasks: Tasks, reporter: Reporter) -> _Measured:
    results, scores = measure_model(candidate, tasks, reporter), RecordedScores()
    for task in tasks.tasks:
        if task.pairs_only:
            task.measure(scores.recording(candidate.model))
    return _Measured(results, scores)
