"""Ensembles of evaluated models: rows whose similarities are the means of their members' (Trans-Encoder, Table 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from distcse.errors import EvaluationOptionError
from distcse.evaluation.contamination import Contamination
from distcse.evaluation.evaluation import Candidate, ModelInfo, ModelResults, measure_model
from distcse.evaluation.models import Ensemble, RecordedScores
from distcse.evaluation.runs import group_runs
from distcse.evaluation.suites import Tasks
from distcse.events import Listener, Reporter

_ALL = "all"


def make_ensembles(texts: Iterable[str], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Make the ensembles of `--ensemble`, which use what their members have computed.

    Args:
        texts: `MODEL,MODEL` or `NAME=MODEL,MODEL` by the models' names in tables; a name of several runs is all of them, and
            `all` is all models.
        candidates: The models.

    Raises:
        EvaluationOptionError: An ensemble has fewer than two members, an unknown one, members of unlike kinds, or a name that
            is taken.
    """
    by_name = {candidate.info.name: candidate for candidate in candidates}
    found: dict[str, Candidate] = {}
    for text in texts:
        name, equals, listed = text.partition("=")
        if not equals:
            name, listed = "ensemble" if text == _ALL else f"ensemble of {text.replace(',', ', ')}", text
        if not name or name in by_name or name in found:
            raise EvaluationOptionError(f"--ensemble {text}: the name {name!r} is empty or taken; write NAME={listed}")
        members = [by_name[member] for member in _members(text, listed, list(by_name))]
        if len(kinds := {member.info.kind for member in members}) > 1:
            raise EvaluationOptionError(
                f"--ensemble {text} has {' and '.join(sorted(kinds))}, whose similarities have different scales; "
                "name models of one kind"
            )
        model = Ensemble([member.model for member in members])
        contamination = Contamination.of_several([member.contamination for member in members])
        found[name] = Candidate(_describe(name, [member.info for member in members]), model, contamination)
    return list(found.values())


def measure_ensemble(
    name: str, members: Sequence[ModelResults], scores: Sequence[RecordedScores], tasks: Tasks, emit: Listener
) -> ModelResults:
    """Measure an ensemble of models that were measured in other processes.

    Args:
        name: Its name in tables.
        members: The members' results.
        scores: The members' similarities of the tasks' pairs.
        tasks: The tasks; those that need vectors are left out.
        emit: Receives the progress.
    """
    infos = [member.info for member in members]
    results = measure_model(Candidate(_describe(name, infos), Ensemble(scores)), tasks, Reporter(emit))
    contamination = Contamination.of_several([Contamination(info.contamination) for info in infos])
    return replace(results, info=replace(results.info, contamination=contamination.overlap))


def _members(text: str, listed: str, names: Sequence[str]) -> list[str]:
    """Return the names of an ensemble's members."""
    if listed == _ALL and _ALL not in names:
        found = list(names)
    else:
        runs = {**group_runs(names), **{name: [name] for name in names}}
        parts = [part.strip() for part in listed.split(",")]
        if unknown := [part for part in parts if part not in runs]:
            raise EvaluationOptionError(
                f"--ensemble {text}: no model is called {unknown[0]!r}; choose from: {', '.join(runs)}"
            )
        found = list(dict.fromkeys(name for part in parts for name in runs[part]))
    if len(found) < 2:
        raise EvaluationOptionError(f"--ensemble {text} has one model; name at least two, or all")
    return found


def _describe(name: str, members: Sequence[ModelInfo]) -> ModelInfo:
    source = f"mean of {', '.join(member.name for member in members)}"
    return ModelInfo(name, source, f"{members[0].kind}s", "pair", 0, 0)
