"""Final evaluation of a mutual distillation: initial models, bi-encoders, cross-encoders and their ensembles.

The test sets may overlap with the training pairs; such scores are marked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from distcse.devices.device import default_device
from distcse.evaluation import (
    MIN_TEXTS,
    Contamination,
    ModelResults,
    RecordedScores,
    Tasks,
    TextsTask,
    make_candidate,
    measure_ensemble,
    measure_model,
    read_dev,
    reporting,
)
from distcse.events import Reporter, StageProgress
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import KINDS, GroupSection, MutualRecipe, decided
from distcse.runs.backend import Backend, DeviceCall
from distcse.runs.cluster_fit import model_memory
from distcse.runs.directory import RunDirectory
from distcse.runs.final_evaluation import (
    FinalScores,
    compare_measured,
    measure_contamination,
    measure_models,
    read_sets,
    stoppable,
)
from distcse.runs.mutual.phase_store import Kind
from distcse.runs.mutual.phase_trainer import load_trained
from distcse.runs.mutual.processes import group_needs
from distcse.runs.result import Best
from distcse.storage import ArtifactStore, open_store
from distcse.text import Pairs

_COMPARED_TEXTS = 1000
_Seen = Mapping[tuple[str, Kind], Contamination]
"""By group and kind: which sentences of the labeled sets its trained models have seen."""


def labelled_tasks(recipe: MutualRecipe) -> Tasks:
    """Read the labeled sets of the final evaluation; see `read_sets`."""
    selected = recipe.evaluation.final_suites
    if selected is None:
        selected = ["sts"] if recipe.evaluation.data else []
    starts = {start for group in recipe.groups for starts in _starts(recipe, group).values() for start in starts}
    return read_sets(recipe, selected, starts)


def contamination_of(recipe: MutualRecipe, pairs: Pairs, tasks: Tasks, reporter: Reporter) -> Contamination:
    """Find the sentences of test and dev sets that are among the training pairs."""
    sets = [task.sentences() for task in tasks.tasks if not isinstance(task, TextsTask)]  # its texts are the pairs'
    return measure_contamination(recipe, reporter.follow(pairs.distinct(), "contamination"), sets)


def _starts(recipe: MutualRecipe, group: GroupSection) -> dict[Kind, set[str]]:
    """Return the models whose training text a group's trained models have seen, by kind."""
    bi, cross = group.backbone, recipe.cross_start(group)
    if recipe.mutual.initialization == "sequential":
        return {"bi": {bi, cross}, "cross": {bi, cross}}
    return {"bi": {bi}, "cross": {cross}}


def unlabelled_tasks(recipe: MutualRecipe, pairs: Pairs, reference: str) -> Tasks:
    """Return what is measured without labeled sets: the dev pairs, and how far the bi-encoders have moved on the run's texts."""
    found, dev = Tasks(), read_dev(recipe)
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
    """Evaluate each group's initial and best models, and their ensembles.

    Each model is evaluated on one of the backend's devices. Test sentences that were among the training pairs are recorded in
    the models' folders. Scores on such sets are transductive, and marked so in tables and model cards. A stop request leaves
    models out, with the ensembles that need them, and a resumed run measures them.

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
        seen[model.group, model.kind].write(open_store(model.model, run.store.guard))
    if not tasks.tasks:
        return FinalScores(None)
    if number := len(contamination.overlap):
        key = "pairs.mine.corpus.exclude_evaluation" if recipe.pairs.mine else None
        note = f"compared with {number} labeled set{'s' * (number > 1)}: {contamination.describe(key)}"
        reporter.emit(StageProgress("contamination", len(pairs), len(pairs), "pairs", finished=True, note=note))
    precision = decided(recipe.evaluation.precision)
    tasks = replace(tasks, timed_texts=tasks.first_sentences())
    shared = backend.share((tasks, seen))
    rows = [_Row("start ensemble", [_Scored(_start_name(name), group, "bi") for name, group in groups.items()])]
    for kind in KINDS:
        models = [
            _Scored(model.name, groups[model.group], kind, open_store(model.model))
            for model in best
            if model.kind == kind
        ]
        rows.append(_Row(f"{kind} ensemble", models))
    calls: list[DeviceCall[_Measured]] = [
        DeviceCall(
            f"evaluation of {model.name}", partial(_measure, model, precision, shared), model_memory(model.source)
        )
        for row in rows
        for model in row.models
    ]
    options = group_needs(recipe, list(groups.values())).options(run.path)
    returned = measure_models(calls, tasks, [precision], run.store, backend, options, reporter)
    measured = iter([None if model is None else _Measured(*model) for model in returned])
    results: list[ModelResults] = []
    for row in rows:
        members = [model for model in islice(measured, len(row.models)) if model is not None]
        results += [member.results for member in members]
        if len(members) == len(row.models) > 1:
            scores = [member.scores for member in members]
            measurements = [member.results for member in members]
            results.append(measure_ensemble(row.ensemble, measurements, scores, tasks, reporter.emit))
    return compare_measured(results, tasks, calls, returned, precision, started_at)


@dataclass(frozen=True)
class _Scored:
    """A model to evaluate."""

    name: str
    """Name in tables."""
    group: GroupSection
    kind: Kind
    model: ArtifactStore | None = None
    """Folder of a trained model; None for the group's initial bi-encoder."""

    @property
    def source(self) -> str:
        """The model's folder or name, as tables show it."""
        return self.group.backbone if self.model is None else str(self.model.path)


class _Row(NamedTuple):
    """Models of one kind, one per group, whose rows stand next to that of their ensemble."""

    ensemble: str
    """Name of the ensemble in tables."""
    models: list[_Scored]


class _Measured(NamedTuple):
    """What the evaluation of one model returns."""

    results: ModelResults
    scores: RecordedScores
    """Similarities of the tasks' pairs, for the ensemble."""


def _start_name(group: str) -> str:
    return f"{group} start"


def _measure(
    scored: _Scored, precision: str, shared: Callable[[], tuple[Tasks, _Seen]], reporter: Reporter
) -> _Measured:
    (tasks, seen), group, recorded = shared(), scored.group, RecordedScores()
    encoder: Encoder | CrossEncoder
    if scored.model is None:
        encoder, contamination = Encoder.from_section(group), Contamination.of_model(group.backbone)
    else:
        scored.model.fetch_folder()
        encoder = load_trained(group, scored.kind, scored.model.path)
        contamination = seen[group.name, scored.kind]
    if scored.model is None:  # as large and as fast as the best trained model
        tasks = replace(tasks, timed_texts=[])
    on_device, progress = encoder.to(default_device()), reporting(reporter, scored.name)
    candidate = make_candidate(scored.name, scored.source, on_device, contamination, precision, progress)
    results = measure_model(candidate, tasks, reporter)
    for task in tasks.tasks:
        if task.pairs_only:
            task.measure(recorded.recording(candidate.model))
    return _Measured(results, recorded)
