"""Evaluate models on tasks: scores with paired bootstrap intervals of their differences, as plain data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distcse.devices.device import default_device
from distcse.errors import StoppedEarlyError
from distcse.evaluation.bootstrap import AverageOf, Estimate, difference
from distcse.evaluation.contamination import Contamination
from distcse.evaluation.models import Ensemble, Model, VectorModel
from distcse.evaluation.results import (
    Comparison,
    Evaluation,
    ModelInfo,
    NeighborChange,
    NeighborChanges,
    Score,
    averaged_sets,
)
from distcse.evaluation.suites import PUBLISHED, Tasks
from distcse.evaluation.tasks import EvalTask, TaskResult, supports
from distcse.evaluation.tasks.agreement import cosines_to_others, with_agreement
from distcse.evaluation.tasks.transfer import TransferTask
from distcse.events import Reporter, StageProgress

_SILENT = Reporter()
_MAX_SHOWN = 12
_MAX_SENTENCES = 5000
TIMED_TEXTS = 128
"""Texts per timed call."""
_CALLS = 3
_SINGLE_CALLS = 20
BUDGET_S = 2.0
"""After this time no further call begins, so that a large model on a CPU is measured by one call of each kind."""


class Speed(NamedTuple):
    """Speed of a model."""

    sentences_per_s: float
    """Throughput of the fastest call, because other processes can only slow one down. For a cross-encoder, in pairs."""
    latency_ms: float
    """Time of the fastest call with one text, or pair, in milliseconds."""


def measure_speed(compute: Callable[[Sequence[str]], object], texts: Sequence[str]) -> Speed:
    """Measure the speed of a model that has computed before, so that its kernels are warm.

    Args:
        compute: Computes the vectors of n texts, without a cache.
        texts: At least one text; the first 128 are timed.
    """
    timed = list(texts[:TIMED_TEXTS])
    calls = _times([timed] * _CALLS, compute)
    singles = _times([[timed[number % len(timed)]] for number in range(_SINGLE_CALLS)], compute)
    return Speed(len(timed) / min(calls), 1000 * min(singles))


def _times(batches: Sequence[Sequence[str]], compute: Callable[[Sequence[str]], object]) -> list[float]:
    """Return the seconds of each call, until the time is used up; at least one."""
    seconds: list[float] = []
    for batch in batches:
        if sum(seconds) > BUDGET_S:
            break
        started_at = perf_counter()
        compute(batch)
        seconds.append(perf_counter() - started_at)
    return seconds


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate."""

    info: ModelInfo
    model: Model
    contamination: Contamination = field(default_factory=lambda: Contamination({}))
    folder: Path | None = None
    """The local folder that it was loaded from; None for a model in memory."""
    tokenizer: Any = field(default=None, repr=False)
    """Its fast tokenizer; None for a static model, and for one of other code."""


@dataclass(frozen=True)
class ModelResults:
    """One model's results on all tasks, before they are compared with other models'. Picklable."""

    info: ModelInfo
    device: str
    """Device of the process that measured it."""
    results: Mapping[tuple[str, str], TaskResult]
    """By suite and set."""
    vectors: NDArray[np.float32] | None
    """(n, d) vectors for `NeighborComparison`; None for a cross-encoder."""


def evaluate(
    candidates: Iterable[Candidate],
    tasks: Tasks,
    *,
    settings: Mapping[str, str] | None = None,
    reporter: Reporter = _SILENT,
    base: str | None = None,
) -> Evaluation:
    """Evaluate every model on every task it supports, and compare the models with one of them.

    Args:
        candidates: Models with distinct names, at least one. An iterator is advanced after the previous model was evaluated,
            so that only one model is in memory.
        tasks: The tasks, and the names of missing sets.
        settings: Stored in the result.
        reporter: Receives the progress. Its stop request leaves out the models that are not measured yet, and a warning says so.
            Default: silent, without stops.
        base: Name of the model that the others are compared with. Default: the first one.

    Raises:
        StoppedEarlyError: It was stopped before the first model was measured.
    """
    started_at = time.perf_counter()
    results: list[ModelResults] = []
    for candidate in candidates:
        try:
            results.append(measure_model(candidate, tasks, reporter))
        except StoppedEarlyError:
            if not results:
                raise
            left_out = f"stopped before the end of {candidate.info.name}; the tables have the models before it"
            tasks = replace(tasks, warnings=[*tasks.warnings, left_out])
            break
        del candidate  # frees its memory before the next one is loaded
    return compare_models(results, tasks, settings=settings, started_at=started_at, base=base)


def measure_model(candidate: Candidate, tasks: Tasks, reporter: Reporter = _SILENT) -> ModelResults:
    """Evaluate one model on every task it supports.

    Args:
        candidate: The model.
        tasks: The tasks.
        reporter: Receives the progress; its stop request ends the measurement. The candidate itself asks between its batches.
            Default: silent, without stops.

    Raises:
        StoppedEarlyError: A stop was requested; this model has no result.
    """
    name, model = candidate.info.name, candidate.model
    supported = [task for task in tasks.tasks if supports(task, model)]
    reporter.check_stop(f"before the evaluation of {name}")
    if isinstance(model, VectorModel):
        model.prepare(text for task in supported for text in task.sentences())
    results = {}
    for done, task in enumerate(supported):
        reporter.advance(name, done, len(supported), f"sets, now {task.suite} {task.name}")
        measured: EvalTask = task
        if isinstance(task, TransferTask):
            progress = partial(reporter.advance, f"{task.name} fits", total=None, unit="done")
            measured = replace(task, on_progress=progress)
        results[task.suite, task.name] = measured.measure(model)
    info, vectors = _describe_model(candidate, tasks.tasks), NeighborComparison.of(tasks.tasks).vectors(model)
    if tasks.timed_texts and not isinstance(model, Ensemble):
        speed = measure_speed(model.compute, tasks.timed_texts)
        info = replace(info, sentences_per_s=speed.sentences_per_s, latency_ms=speed.latency_ms)
    note = f"{len(supported)} {'set' if len(supported) == 1 else 'sets'}, {model.seconds:.1f} s in the model"
    reporter.emit(StageProgress(name, len(supported), len(supported), "sets", finished=True, note=note))
    return ModelResults(info, default_device(), results, vectors)


def compare_models(
    results: Sequence[ModelResults],
    tasks: Tasks,
    *,
    settings: Mapping[str, str] | None = None,
    started_at: float,
    base: str | None = None,
) -> Evaluation:
    """Compare the models' results with those of one of them.

    Args:
        results: The results of models with distinct names, at least one.
        tasks: The tasks that they were measured on.
        settings: Stored in the result.
        started_at: `time.perf_counter()` at the start of the evaluation.
        base: Name of the model that the others are compared with. Default: the first one, also if this one has no result.
    """
    estimates: dict[tuple[str, str], dict[str, dict[str, Estimate]]] = {}
    details: dict[str, dict[str, dict[str, Any]]] = {}
    for name, model_results in with_agreement(
        {model.info.name: model.results for model in results}, tasks.tasks
    ).items():
        for (suite, dataset), result in model_results.items():
            for measure, estimate in result.scores.items():
                estimates.setdefault((suite, dataset), {}).setdefault(measure, {})[name] = estimate
            details.setdefault(suite, {}).setdefault(dataset, {})[name] = dict(result.details)
    names = [model.info.name for model in results]
    base = base if base in names else names[0]
    vectors = {model.info.name: model.vectors for model in results}
    return Evaluation(
        models=[model.info for model in results],
        base=base,
        scores=_score_columns(estimates),
        details=details,
        missing=tasks.missing,
        warnings=tasks.warnings,
        settings=settings or {},
        neighbors=NeighborComparison.of(tasks.tasks).changes(vectors, base),
        seconds=time.perf_counter() - started_at,
    )


def _describe_model(candidate: Candidate, tasks: Iterable[EvalTask]) -> ModelInfo:
    contamination = {}
    if candidate.contamination.overlap:
        shares = {f"{task.suite}/{task.name}": candidate.contamination.overlap_of(task.sentences()) for task in tasks}
        contamination = {name: share for name, share in shares.items() if share is not None}
    return ModelInfo(**{**asdict(candidate.info), "seconds": candidate.model.seconds, "contamination": contamination})


def _score_columns(estimates: Mapping[tuple[str, str], Mapping[str, Mapping[str, Estimate]]]) -> list[Score]:
    """List the scores: each suite's sets in their order, followed by the suite's averages."""
    scores: list[Score] = []
    for suite in dict.fromkeys(suite for suite, _ in estimates):
        by_set = {name: measures for (of, name), measures in estimates.items() if of == suite}
        scores += [
            Score(suite, name, measure, _point_values(by_model), _compare_all(by_model))
            for name, measures in by_set.items()
            for measure, by_model in measures.items()
        ]
        published = averaged_sets(suite, by_set)
        if len(published) > 1:
            is_complete = len(published) == len(PUBLISHED[suite])
            title = "average" if is_complete else f"average of {len(published)} of {len(PUBLISHED[suite])}"
            for measure in by_set[published[0]]:
                parts = [by_set[name][measure] for name in published]
                average = {model: AverageOf([part[model] for part in parts]) for model in parts[0]}
                scores.append(Score(suite, title, measure, _point_values(average), _compare_all(average), average=True))
    return scores


def _point_values(by_model: Mapping[str, Estimate]) -> dict[str, float]:
    return {model: estimate.value for model, estimate in by_model.items()}


def _compare_all(by_model: Mapping[str, Estimate]) -> list[Comparison]:
    """Compare all ordered pairs of models whose scores can be resampled."""
    found = []
    for model, ours in by_model.items():
        for other, theirs in by_model.items():
            if model != other and (gap := difference(ours, theirs)) is not None:
                found.append(Comparison(model, other, gap))
    return found


class NeighborComparison:
    """Compares models by their vectors of up to 5,000 distinct sentences, so that models need not stay in memory.

    Args:
        texts: The sentences; with fewer than two, there is nothing to compare.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = list(dict.fromkeys(texts))[:_MAX_SENTENCES]

    @classmethod
    def of(cls, tasks: Sequence[EvalTask]) -> NeighborComparison:
        """Take the sentences of STS-B, or of the first set."""
        chosen = sorted(tasks, key=lambda task: task.name != "STS-B")
        return cls(chosen[0].sentences() if chosen else [])

    def vectors(self, model: Model) -> NDArray[np.float32] | None:
        """Return a model's (n, d) unit vectors of the sentences; None for a cross-encoder, which has none."""
        return model.unit_vectors(self._texts) if isinstance(model, VectorModel) and len(self._texts) > 1 else None

    def changes(self, vectors: Mapping[str, NDArray[np.float32] | None], base: str) -> dict[str, NeighborChanges]:
        """Compare the other models' neighbors with those of `base`; empty if `base` has no vectors.

        Args:
            vectors: By model: what `vectors` returned.
            base: Name of the model to compare with.
        """
        before = vectors.get(base)
        if before is None:
            return {}
        return {
            name: changed_neighbors(before, after, self._texts)
            for name, after in vectors.items()
            if after is not None and name != base
        }


def changed_neighbors(
    before: NDArray[np.floating], after: NDArray[np.floating], texts: Sequence[str]
) -> NeighborChanges:
    """Compare the nearest neighbors of n texts between two (n, d) arrays of unit vectors, n ≥ 2."""
    old = cosines_to_others(before).argmax(axis=1)
    cosines = cosines_to_others(after)
    new = cosines.argmax(axis=1)
    rows = np.arange(len(texts))
    cosine_gain = np.where(old == new, -np.inf, cosines[rows, new] - cosines[rows, old])
    changed = int((old != new).sum())
    examples = np.argsort(-cosine_gain, kind="stable")[: min(_MAX_SHOWN, changed)]
    return NeighborChanges(
        len(texts),
        changed,
        [NeighborChange(texts[row], texts[old[row]], texts[new[row]], float(cosine_gain[row])) for row in examples],
    )
