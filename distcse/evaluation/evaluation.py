"""One evaluation: models times tasks, figures with the paired bootstrap of their differences, as plain data."""

from __future__ import annotations

import json
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distcse.errors import EvaluationResultError
from distcse.evaluation.catalogue import PUBLISHED
from distcse.evaluation.contamination import Contamination
from distcse.evaluation.estimates import AverageOf, Difference, Estimate, difference
from distcse.evaluation.models import Model, VectorModel
from distcse.evaluation.neighbours import Changed, Changes, Neighbourhoods
from distcse.evaluation.suites import Tasks
from distcse.evaluation.tasks import EvalTask, can_do
from distcse.events import Listener, StageProgress, ignore
from distcse.storage import write_text_atomic


@dataclass(frozen=True)
class ModelInfo:
    """What a reader wants to know of a model that was measured."""

    name: str
    source: str
    kind: str
    """bi-encoder or cross-encoder."""
    pooling: str
    max_length: int
    parameters: int
    seconds: float = 0.0
    """Spent in the model itself, all suites together."""
    contamination: Mapping[str, float] = field(default_factory=dict)
    """Share of the sentences of each `suite/set` that it was trained on, where that is known."""


@dataclass(frozen=True)
class Candidate:
    """A model to measure."""

    about: ModelInfo
    model: Model
    contamination: Contamination = field(default_factory=lambda: Contamination({}))


@dataclass(frozen=True)
class Comparison:
    """How far a model is above another on one score, and where 95 % of paired bootstrap resamples lie."""

    model: str
    against: str
    difference: Difference


@dataclass(frozen=True)
class Score:
    """One measure on one set: a column of a table."""

    suite: str
    set: str
    measure: str
    values: Mapping[str, float]
    """By model; a model that cannot be measured so is not there."""
    comparisons: Sequence[Comparison] = ()
    average: bool = False

    def against(self, model: str, other: str) -> Difference | None:
        """How a model compares with another; None where nothing can be resampled."""
        found = (c.difference for c in self.comparisons if (c.model, c.against) == (model, other))
        return next(found, None)


@dataclass(frozen=True)
class Evaluation:
    """Everything measured, as it is stored in evaluation.json."""

    models: Sequence[ModelInfo]
    base: str
    """The model that tables compare the others with."""
    scores: Sequence[Score]
    details: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """By suite, set and model: what pictures are drawn from."""
    missing: Sequence[str]
    warnings: Sequence[str]
    settings: Mapping[str, str]
    neighbours: Mapping[str, Changes]
    """By model: how its nearest neighbours differ from the base's."""
    seconds: float

    def figure(self, suite: str, of: str, measure: str, model: str) -> float:
        """One figure. Raises `EvaluationError` where it was not measured."""
        found = next((s for s in self.scores if (s.suite, s.set, s.measure) == (suite, of, measure)), None)
        if found is None or model not in found.values:
            there = ", ".join(sorted({f"{s.suite}/{s.set}/{s.measure}" for s in self.scores}))
            raise EvaluationResultError(f"{suite}/{of}/{measure} of {model} was not measured; there are: {there}")
        return found.values[model]

    def overlap_fraction(self, score: Score, model: str) -> float:
        """Share of a set's sentences that were in a model's training text; for an average the largest of its sets'."""
        exposure = next(about.contamination for about in self.models if about.name == model)
        measured = {s.set for s in self.scores if s.suite == score.suite and not s.average}
        sets = _averaged(score.suite, measured) if score.average else [score.set]
        return max((exposure.get(f"{score.suite}/{name}", 0.0) for name in sets), default=0.0)

    def write(self, file: Path) -> None:
        """Store as JSON."""
        write_text_atomic(file, json.dumps(asdict(self), indent=1, ensure_ascii=False))

    @classmethod
    def read(cls, file: Path) -> Evaluation:
        """What `write` stored.

        Raises:
            EvaluationError: The file is not there, or is none of ours.
        """
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            return cls(
                **{
                    **stored,
                    "models": [ModelInfo(**about) for about in stored["models"]],
                    "scores": [_score(score) for score in stored["scores"]],
                    "neighbours": {name: _changes(entry) for name, entry in stored["neighbours"].items()},
                }
            )
        except (OSError, ValueError, KeyError, TypeError) as bad:
            raise EvaluationResultError(f"{file} is no evaluation: {bad}") from None


def evaluate(
    candidates: Iterable[Candidate],
    tasks: Tasks,
    *,
    base: str | None = None,
    settings: Mapping[str, str] | None = None,
    post: Listener = ignore,
) -> Evaluation:
    """Measure every model on every task.

    Args:
        candidates: Models with different names, at least one. Asked for one after the other, each when those before it are
            measured, and none is held longer.
        tasks: What to measure, and what was missing.
        base: Name of the model to compare with; None takes the first.
        settings: Noted in the result.
        post: Told what is at work.
    """
    begun = time.perf_counter()
    estimates: dict[tuple[str, str], dict[str, dict[str, Estimate]]] = {}
    details: dict[str, dict[str, dict[str, Any]]] = {}
    models, seen = [], Neighbourhoods.of(tasks.tasks)
    for candidate in candidates:
        name, model = candidate.about.name, candidate.model
        able = [task for task in tasks.tasks if can_do(task, model)]
        if isinstance(model, VectorModel):
            model.prepare(text for task in able for text in task.sentences())
        for done, task in enumerate(able):
            post(StageProgress(name, done, len(able), f"sets, now {task.suite} {task.name}"))
            outcome = task.measure(model)
            for measure, estimate in outcome.figures.items():
                estimates.setdefault((task.suite, task.name), {}).setdefault(measure, {})[name] = estimate
            details.setdefault(task.suite, {}).setdefault(task.name, {})[name] = dict(outcome.details)
        models.append(_about(candidate, tasks.tasks))
        seen.look(name, model)
        note = f"{len(able)} {'set' if len(able) == 1 else 'sets'}, {candidate.model.seconds:.1f} s in the model"
        post(StageProgress(name, len(able), len(able), "sets", finished=True, note=note))
        del candidate, model  # the next one has its place
    base = base or models[0].name
    return Evaluation(
        models=models,
        base=base,
        scores=_scores(estimates),
        details=details,
        missing=tasks.missing,
        warnings=tasks.warnings,
        settings=settings or {},
        neighbours=seen.changes(base),
        seconds=time.perf_counter() - begun,
    )


def _about(candidate: Candidate, tasks: Iterable[EvalTask]) -> ModelInfo:
    exposure = {}
    if candidate.contamination.overlap:
        shares = {f"{task.suite}/{task.name}": candidate.contamination.of(task.sentences()) for task in tasks}
        exposure = {name: share for name, share in shares.items() if share is not None}
    return ModelInfo(**{**asdict(candidate.about), "seconds": candidate.model.seconds, "exposure": exposure})


def _scores(estimates: Mapping[tuple[str, str], Mapping[str, Mapping[str, Estimate]]]) -> list[Score]:
    """Sets in their order, the averages of a suite after its sets."""
    scores: list[Score] = []
    for suite in dict.fromkeys(suite for suite, _ in estimates):
        mine = {name: measures for (of, name), measures in estimates.items() if of == suite}
        scores += [
            Score(suite, name, measure, _values(by_model), _compared(by_model))
            for name, measures in mine.items()
            for measure, by_model in measures.items()
        ]
        published = _averaged(suite, mine)
        if len(published) > 1:
            whole = len(published) == len(PUBLISHED[suite])
            title = "average" if whole else f"average of {len(published)} of {len(PUBLISHED[suite])}"
            for measure in mine[published[0]]:
                parts = [mine[name][measure] for name in published]
                average = {model: AverageOf([part[model] for part in parts]) for model in parts[0]}
                scores.append(Score(suite, title, measure, _values(average), _compared(average), average=True))
    return scores


def _averaged(suite: str, measured: Container[str]) -> list[str]:
    """The sets that a suite's average is over, of those that were measured."""
    return [known.name for known in PUBLISHED.get(suite, ()) if known.name in measured]


def _values(by_model: Mapping[str, Estimate]) -> dict[str, float]:
    return {model: estimate.value for model, estimate in by_model.items()}


def _compared(by_model: Mapping[str, Estimate]) -> list[Comparison]:
    """All ordered pairs, those that can be resampled."""
    found = []
    for model, ours in by_model.items():
        for other, theirs in by_model.items():
            if model != other and (apart := difference(ours, theirs)) is not None:
                found.append(Comparison(model, other, apart))
    return found


def _score(stored: dict[str, Any]) -> Score:
    comparisons = [
        Comparison(entry["model"], entry["against"], Difference(**entry["difference"]))
        for entry in stored["comparisons"]
    ]
    return Score(**{**stored, "comparisons": comparisons})


def _changes(stored: dict[str, Any]) -> Changes:
    return Changes(stored["sentences"], stored["changed"], [Changed(**entry) for entry in stored["clearest"]])
