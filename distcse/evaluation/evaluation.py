"""Evaluate models on tasks: scores with paired bootstrap intervals of their differences, as plain data."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from distcse.devices.device import default_device
from distcse.errors import StoppedEarlyError
from distcse.evaluation.bootstrap import AverageOf, Estimate, Interval, difference, ratio
from distcse.evaluation.contamination import Contamination
from distcse.evaluation.models import Ensemble, Model, VectorModel
from distcse.evaluation.results import (
    Comparison,
    Evaluation,
    ModelInfo,
    Score,
    averaged_sets,
    choose_reference,
)
from distcse.evaluation.suites import PUBLISHED, Tasks
from distcse.evaluation.tasks import EvalTask, TaskResult, supports
from distcse.evaluation.tasks.agreement import HeldOutVectors, TextsTask, with_agreement
from distcse.evaluation.tasks.retrieval import RetrievalTask
from distcse.evaluation.tasks.transfer import TransferTask
from distcse.events import Reporter, StageProgress

_SILENT = Reporter()
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
    """Measure the speed of a model that has computed before, so that its kernels are warm."""
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


def evaluate(
    candidates: Iterable[Candidate],
    tasks: Tasks,
    *,
    settings: Mapping[str, str] | None = None,
    reporter: Reporter = _SILENT,
    base: str | None = None,
) -> Evaluation:
    """Evaluate every model on every task it supports, and compare the models with one of them (`base`; see `choose_reference`).

    An iterator of candidates is advanced after the previous model was evaluated, so that only one model is in memory. A stop
    request leaves out the models that are not measured yet, and a warning says so; before the first one is measured, it raises.
    """
    started_at = time.perf_counter()
    results: list[ModelResults] = []
    for candidate in candidates:
        try:
            results.append(measure_model(candidate, tasks, reporter))
            results += _measure_formats(candidate, results[-1], tasks, reporter)
        except StoppedEarlyError:
            if not results:
                raise
            left_out = f"stopped before the end of {candidate.info.name}; the tables have the models before it"
            tasks = replace(tasks, warnings=[*tasks.warnings, left_out])
            break
        del candidate  # frees its memory before the next one is loaded
    return compare_models(results, tasks, settings=settings, started_at=started_at, base=base)


def measure_model(candidate: Candidate, tasks: Tasks, reporter: Reporter = _SILENT) -> ModelResults:
    """Evaluate one model on every task it supports."""
    name, model = candidate.info.name, candidate.model
    supported = [task for task in tasks.tasks if supports(task, model)]
    reporter.check_stop(f"before the evaluation of {name}")
    if isinstance(model, VectorModel):
        plain = [task for task in supported if not _reads_by_role(task)]
        model.prepare(text for task in plain for text in task.sentences())
    results = {}
    for done, task in enumerate(supported):
        reporter.advance(name, done, len(supported), f"sets, now {task.suite} {task.name}")
        measured: EvalTask = task
        if isinstance(task, TransferTask):
            progress = partial(reporter.advance, f"{task.name} fits", total=None, unit="done")
            measured = replace(task, on_progress=progress)
        elif isinstance(task, RetrievalTask):
            measured = _reporting_search(task, reporter)
        results[task.suite, task.name] = measured.measure(model)
    info = _describe_model(candidate, tasks.tasks)
    if tasks.timed_texts and not isinstance(model, Ensemble):
        speed = measure_speed(model.compute, tasks.timed_texts)
        info = replace(info, sentences_per_s=speed.sentences_per_s, latency_ms=speed.latency_ms)
    note = f"{len(supported)} {'set' if len(supported) == 1 else 'sets'}, {model.seconds:.1f} s in the model"
    reporter.emit(StageProgress(name, len(supported), len(supported), "sets", finished=True, note=note))
    return ModelResults(info, default_device(), results)


def _reads_by_role(task: EvalTask) -> bool:
    return isinstance(task, RetrievalTask) or (isinstance(task, HeldOutVectors) and bool(task.roles))


def _reporting_search(task: RetrievalTask, reporter: Reporter) -> RetrievalTask:
    progress = partial(reporter.advance, f"{task.name} search", total=None, unit="products")
    return replace(task, on_progress=progress)


def _measure_formats(
    candidate: Candidate, measured: ModelResults, tasks: Tasks, reporter: Reporter
) -> list[ModelResults]:
    """Measure retrieval in each format that changes the vectors of a model, which has encoded its texts."""
    found, info = [], measured.info
    if not isinstance(candidate.model, VectorModel):
        return []
    for number, each in enumerate(tasks.formats):
        reporter.advance(info.name, number, len(tasks.formats), f"formats, now {each}")
        width = each.dimensions or info.dimensions
        if each.dimensions is not None and each.dimensions >= info.dimensions:
            continue
        results = {}
        for task in tasks.tasks:
            if isinstance(task, RetrievalTask):
                search = replace(_reporting_search(task, reporter), format=each)
                results[task.suite, task.name] = search.measure(candidate.model)
        about = replace(
            info, name=f"{info.name}, {each}", dimensions=width, seconds=0.0, sentences_per_s=None, latency_ms=None
        )
        found.append(replace(measured, info=about, results=results))
    return found


def compare_models(
    results: Sequence[ModelResults],
    tasks: Tasks,
    *,
    settings: Mapping[str, str] | None = None,
    started_at: float,
    base: str | None = None,
    teachers: Collection[str] = (),
) -> Evaluation:
    """Compare the models' results with those of one of them (`base`; default: of `choose_reference`, of a run's `teachers`)."""
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
    scores = _score_columns(estimates)
    return Evaluation(
        models=[model.info for model in results],
        base=base if base in names else choose_reference(names, scores, teachers),
        scores=scores,
        details=details,
        missing=tasks.missing,
        warnings=tasks.warnings,
        settings=settings or {},
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
            Score(
                suite,
                name,
                measure,
                _point_values(by_model),
                _compare_all(by_model),
                intervals=_intervals(suite, by_model),
            )
            for name, measures in by_set.items()
            for measure, by_model in measures.items()
        ]
        published = averaged_sets(suite, by_set)
        if len(published) > 1:
            every = len(PUBLISHED.get(suite, published))
            title = "average" if len(published) == every else f"average of {len(published)} of {every}"
            for measure in by_set[published[0]]:
                parts = [by_set[name][measure] for name in published]
                average = {model: AverageOf([part[model] for part in parts]) for model in parts[0]}
                scores.append(Score(suite, title, measure, _point_values(average), _compare_all(average), average=True))
    return scores


def _point_values(by_model: Mapping[str, Estimate]) -> dict[str, float]:
    return {model: estimate.value for model, estimate in by_model.items()}


def _intervals(suite: str, by_model: Mapping[str, Estimate]) -> dict[str, Interval]:
    """Return the intervals of scores that are agreements; other scores have intervals of their comparisons."""
    if suite not in (HeldOutVectors.suite, TextsTask.suite):
        return {}
    resampled = {model: estimate.resampled for model, estimate in by_model.items()}
    return {model: Interval.of(by_model[model].value, drawn) for model, drawn in resampled.items() if drawn is not None}


def _compare_all(by_model: Mapping[str, Estimate]) -> list[Comparison]:
    """Compare all ordered pairs of models whose scores can be resampled."""
    found = []
    for model, ours in by_model.items():
        for other, theirs in by_model.items():
            if model != other and (gap := difference(ours, theirs)) is not None:
                found.append(Comparison(model, other, gap, ratio(ours, theirs)))
    return found
