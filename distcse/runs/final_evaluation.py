"""The final evaluation of a run of any kind: its sets, what the training text contained of them, and its models.

Each model's results are stored at once: after a stop, a resumed run measures the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec

from distcse.devices.device_plan import DeviceOptions
from distcse.errors import StoppedEarlyError
from distcse.evaluation import (
    SUITES,
    Contamination,
    Evaluation,
    ModelResults,
    Tasks,
    collect,
    compare_models,
    evaluation_sentences,
    read_dev,
    refuse_test_as_dev,
)
from distcse.evaluation.encoding import decode_result, encode_result
from distcse.events import LogMessage, Reporter
from distcse.recipe import CorpusSection, MutualRecipe, Recipe, labelled_folder
from distcse.runs.backend import Backend, DeviceCall
from distcse.storage import ArtifactStore, content_key
from distcse.text import Excluded

P = ParamSpec("P")
_FOLDER = "evaluation"


def read_sets(recipe: Recipe | MutualRecipe, selected: Sequence[str], models: Iterable[str]) -> Tasks:
    """Read the labeled sets of the selected suites. Runs call it first, so that a malformed file fails before training.

    Raises:
        EvaluationFormatError: A set is malformed.
        EvaluationResultError: The record of contamination of one of the `models`, which the trained ones inherit, cannot be read.
        EvaluationError: The dev set is missing, or is also a test set without evaluation.dev_is_test.
    """
    for model in models:
        if Path(model).is_dir():
            Contamination.of_model(model)
    dev, suites = read_dev(recipe), [suite for suite in SUITES if suite in selected]
    if not suites:
        return Tasks()
    tasks = collect(labelled_folder(recipe.evaluation.data), suites, [])
    if dev is not None:
        refuse_test_as_dev(dev.first, dev.second, tasks, recipe.evaluation.dev_is_test)
    return tasks


def measure_contamination(
    recipe: Recipe | MutualRecipe, texts: Iterable[str], sets: Iterable[Iterable[str]]
) -> Contamination:
    """Find the sentences of test and dev sets that are among the training texts."""
    return Contamination.measure(texts, [*sets, *([dev] if (dev := _dev_sentences(recipe)) else [])])


def excluded_sentences(recipe: Recipe | MutualRecipe, corpus: CorpusSection) -> Excluded | None:
    """Return the sentences that a recipe excludes from a corpus: those of its test and dev sets; None if it excludes none."""
    dev = _dev_sentences(recipe) if corpus.exclude_evaluation else []
    data = recipe.evaluation.data
    return evaluation_sentences(corpus, None if data is None else labelled_folder(data), dev)


def _dev_sentences(recipe: Recipe | MutualRecipe) -> list[str]:
    dev = read_dev(recipe)
    return [] if dev is None else [*dev.first, *dev.second]


@dataclass(frozen=True)
class FinalScores:
    """What a final evaluation measured."""

    evaluation: Evaluation | None
    """The scores; None if there is nothing to measure, or if it was stopped before the first model was measured."""
    stopped: bool = False
    """Whether a stop request left models out."""

    def write(self, run: ArtifactStore, results: ArtifactStore | None = None) -> None:
        """Write the scores, if there are any, and delete the results that `measure_models` stored, if it is complete."""
        if self.evaluation is None:
            return
        self.evaluation.write(run)
        if not self.stopped:
            ((results or run) / _FOLDER).delete_all()


def stoppable(evaluate: Callable[P, FinalScores]) -> Callable[P, FinalScores]:
    """Make a final evaluation return no scores where a stop ends its preparation, so that the run ends with its models."""

    @wraps(evaluate)
    def evaluated(*args: P.args, **kwargs: P.kwargs) -> FinalScores:
        try:
            return evaluate(*args, **kwargs)
        except StoppedEarlyError:
            return FinalScores(None, stopped=True)

    return evaluated


def measure_models(
    calls: Sequence[DeviceCall[Any]],
    tasks: Tasks,
    settings: Sequence[str],
    run: ArtifactStore,
    backend: Backend,
    options: DeviceOptions,
    reporter: Reporter,
) -> list[Any]:
    """Measure models on the backend's devices, except those whose results an earlier start of the run has stored.

    Args:
        calls: One per model; they return what `encode_result` encodes.
        tasks: The tasks that they measure.
        settings: What else determines the results, such as the precision.
        run: The run's folder, to which `options` lets all processes write.
        backend: Where the models are measured.
        options: The devices that can measure them.
        reporter: Receives progress, and the names of models that were left out. Its stop request ends the evaluation.

    Returns:
        What the calls returned, in their order, with named tuples as tuples; None for models that were left out.
    """
    determined_by = [settings, tasks.fingerprints()]
    keys = [content_key([number, call.name, determined_by]) for number, call in enumerate(calls)]
    files = [f"{_FOLDER}/{key}.json" for key in keys]
    results = [_read(run, file, call.name, reporter) for file, call in zip(files, calls, strict=True)]
    missing = [number for number, result in enumerate(results) if result is None]
    if len(missing) < len(calls):
        text = f"{len(calls) - len(missing)} of {len(calls)} models were evaluated before the run was stopped"
        reporter.emit(LogMessage(text))
    storing = [
        replace(calls[number], function=partial(_measure_and_store, calls[number].function, run, files[number]))
        for number in missing
    ]
    if storing and not reporter.stop_requested():
        with suppress(StoppedEarlyError):  # what was left out is reported below
            backend.run_on_devices(storing, options, reporter)
        for number in missing:
            results[number] = _read(run, files[number], calls[number].name, reporter)
    if left_out := [call.name for call, result in zip(calls, results, strict=True) if result is None]:
        reporter.warn(f"stopped before the end of the {', '.join(left_out)}; continue with --resume")
    return results


def compare_measured(
    results: Sequence[ModelResults],
    tasks: Tasks,
    calls: Sequence[DeviceCall[Any]],
    returned: Sequence[Any],
    precision: str,
    started_at: float,
    teachers: Collection[str] = (),
) -> FinalScores:
    """Compare the models that were measured, and add those that were left out to what is missing; see `compare_models`."""
    left_out = [f"{call.name}: stopped" for call, result in zip(calls, returned, strict=True) if result is None]
    if not results:
        return FinalScores(None, bool(left_out))
    tasks = Tasks(tasks.tasks, [*tasks.missing, *left_out], tasks.warnings)
    devices = ", ".join(sorted({model.device for model in results}))
    settings = {"STS": "all", "device": devices, "precision": precision}
    evaluation = compare_models(results, tasks, settings=settings, started_at=started_at, teachers=teachers)
    return FinalScores(evaluation, bool(left_out))


def _measure_and_store(measure: Callable[[Reporter], Any], run: ArtifactStore, file: str, reporter: Reporter) -> None:
    run.write_json(file, {"result": encode_result(measure(reporter))})


def _read(run: ArtifactStore, file: str, name: str, reporter: Reporter) -> Any:
    """Return a stored result; None if there is none, or it is damaged."""
    try:
        stored = run.read_json(file)
        return None if stored is None else decode_result(stored["result"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reporter.warn(f"the stored results of the {name} cannot be read ({error}), and it is measured again")
        return None
