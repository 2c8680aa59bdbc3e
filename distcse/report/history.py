"""Reads the history of a run from its directory: curves, stages and versions, and a mutual distillation's cycles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from distcse.errors import RunDirectoryError, RunError
from distcse.runs.directory import recorded
from distcse.runs.mutual.phase_store import Phase, PhaseStore, Scores
from distcse.storage import open_store

COMPARED_PAIRS = 1_000_000
"""Pairs whose scores are compared, at most; evenly spaced. The correlation's standard error is then at most 0.1."""


@dataclass(frozen=True)
class Span:
    """An activity of a group, in seconds since the run began."""

    group: str
    phase: str
    activity: str
    begin: float
    end: float


@dataclass(frozen=True)
class Cycles:
    """History of a mutual distillation by phase."""

    groups: list[str]
    dev: Mapping[str, Mapping[int, float]]
    """Best dev score of a phase, by `group kind`, then by cycle; cycle 0 is the start."""
    agreement: Mapping[str, Mapping[str, float]]
    """Spearman correlation × 100 of two groups' scores, by phase, then by pair of groups."""
    spans: Sequence[Span]
    dropped: Mapping[str, str]
    """Reason for each dropped group."""

    @property
    def number(self) -> int:
        """Number of cycles that at least one group has completed."""
        return max((cycle for scores in self.dev.values() for cycle in scores), default=0)

    @property
    def columns(self) -> dict[int, str]:
        """Names of the columns of dev scores, by cycle: the start, if its scores are known, and the cycles."""
        first = 0 if any(0 in scores for scores in self.dev.values()) else 1
        return {cycle: f"cycle {cycle}" if cycle else "start" for cycle in range(first, self.number + 1)}

    @property
    def pairs(self) -> list[str]:
        """Pairs of groups whose scores were compared."""
        return list(dict.fromkeys(pair for row in self.agreement.values() for pair in row))


def read_cycles(run: Path, groups: Sequence[str], events: Sequence[Mapping[str, Any]]) -> Cycles:
    """Read the history from a run's phase store and its events."""
    store = PhaseStore(open_store(run))
    dev: dict[str, dict[int, float]] = {f"{group} bi": {0: score} for group, score in store.starts.items()}
    agreement: dict[str, dict[str, float]] = {}
    number = 0
    while posted := store.posted(phase := Phase(number)):
        for group, entry in posted.items():
            if entry.get("dev") is not None:
                dev.setdefault(f"{group} {phase.kind}", {})[phase.cycle] = entry["dev"]
        ranks = {group: _ranks(store.scores(group, phase)) for group in groups if group in posted}
        compared = {f"{a} – {b}": _correlation(ranks[a], ranks[b]) for a, b in combinations(ranks, 2)}
        if compared:
            agreement[phase.name] = compared
        number += 1
    ordered = {name: dev[name] for group in groups for name in (f"{group} bi", f"{group} cross") if name in dev}
    return Cycles(list(groups), ordered, agreement, _spans(events), store.dropped)


def _ranks(scores: Scores) -> NDArray[np.float64]:
    """Return centered ranks of unit length of at most `COMPARED_PAIRS` of the scores; zeros if all are equal."""
    from scipy.stats import rankdata  # imported late, so that a run's first step does not wait 0.5 s for it

    ranks = rankdata(scores[:: -(-len(scores) // COMPARED_PAIRS)])
    ranks -= ranks.mean()
    length = np.linalg.norm(ranks)
    return np.asarray(ranks / length if length else ranks)


def _correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the Spearman correlation × 100 of scores with these ranks; 0 if one side is constant."""
    return float(100 * (one @ other))


def _spans(events: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Return the activities; each lasts until its group's next one, with a gap where the run was resumed."""
    spans: list[Span] = []
    running: dict[str, tuple[str, str, float]] = {}
    began = events[0]["time"] if events else 0.0
    for event in events:
        if event["event"] == "LogMessage" and event["text"].startswith("run directory"):
            running.clear()
        if event["event"] != "GroupActivity":
            continue
        group, now = event["group"], event["time"] - began
        if group in running:
            phase, activity, since = running[group]
            spans.append(Span(group, phase, activity, since, now))
        running[group] = (event["phase"], event["activity"], now)
    return spans


@dataclass(frozen=True)
class History:
    """Curves, stages and environment of a run."""

    name: str
    losses: dict[str, list[tuple[int, float]]]
    """(step, value) by name of the loss term."""
    dev_name: str
    """Name of the dev score."""
    dev: list[tuple[int, float]]
    """(step, score)."""
    stages: list[tuple[str, float, str]]
    """(name, seconds, what was done), in order."""
    recipe: str
    """The resolved recipe as YAML."""
    versions: dict[str, str]
    circumstances: dict[str, str]
    """Seed, commit, platform, Python version and fingerprints of the data."""
    seconds: float
    """Seconds from the first event to the last."""
    cycles: Cycles | None = None
    """History of a mutual distillation's groups; None for a student."""

    @property
    def best(self) -> tuple[int, float] | None:
        """The best dev score; of equal ones, the earliest."""
        return max(self.dev, key=lambda entry: (entry[1], -entry[0])) if self.dev else None


def read_run(path: Path) -> History:
    """Read the history of a run's directory. Of steps reported twice, because the run was resumed, the later one counts."""
    try:
        record = recorded(path)
        recipe = (path / "recipe.yaml").read_text(encoding="utf-8")
        events = list(_events(path / "events.jsonl"))
    except (OSError, ValueError, RunError) as error:
        raise RunDirectoryError(f"{path} is not a readable run: {error}") from None
    losses: dict[str, dict[int, float]] = {}
    dev: dict[int, float] = {}
    stages: list[tuple[str, float, str]] = []
    dev_name, before, training, grouped = "", events[0]["time"] if events else 0.0, 0.0, 0.0
    for event in events:
        kind, time = event["event"], event["time"]
        if "group" in event:
            grouped, before = grouped + time - before, time  # groups run in parallel: `cycles` has their times
            continue
        if kind == "StepReport":
            for part, value in event["losses"].items():
                losses.setdefault(part, {})[event["step"]] = value
            training += time - before
        elif kind == "DevScore":
            dev_name, dev[event["step"]] = event["name"], event["score"]
            training += time - before
        elif kind == "StageProgress" and event["finished"]:
            stages.append((event["name"], time - before, event["note"]))
        elif kind == "StageProgress":
            continue  # the time counts when the stage finishes
        before = time
    document = yaml.safe_load(recipe)
    groups = [group["name"] for group in document.get("groups", [])]
    last = max((step for values in losses.values() for step in values), default=0)
    position = next(
        (index for index, stage in enumerate(stages) if stage[0] in ("contamination", "start")), len(stages)
    )
    if last:
        stages.insert(position, ("training", training, f"{last:,} steps, dev scores included"))
    if groups:
        stages.insert(position, ("groups", grouped, f"{len(groups)} in parallel: training, scoring, waiting"))
    elif family := document.get("family"):
        stages.insert(position, ("students", grouped, f"{len(family)}, one after the other"))
    return History(
        name=path.name,
        losses={part: sorted(values.items()) for part, values in losses.items()},
        dev_name=dev_name,
        dev=sorted(dev.items()),
        stages=stages,
        recipe=recipe,
        versions=record["versions"],
        circumstances={
            "seed": str(document["seed"]),
            "commit": _commit(record),
            "platform": record["platform"],
            "Python": record["python"],
            **record["data"],
        },
        seconds=events[-1]["time"] - events[0]["time"] if events else 0.0,
        cycles=read_cycles(path, groups, events) if groups else None,
    )


def _commit(record: dict[str, Any]) -> str:
    commit = record["commit"] or "not from a checkout"
    return f"{commit}, with changes" if record["changed"] else commit


def _events(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of events.jsonl, without lines that a kill or a full disk cut short."""
    with open(file, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(ValueError):
                yield json.loads(line)
