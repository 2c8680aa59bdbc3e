"""What the groups of a mutual distillation did: dev scores by cycle, how far their labels agree, and who worked when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from distcse.evaluation.estimates import spearman
from distcse.experiments.mutual.phase_store import PhaseStore
from distcse.experiments.mutual.phases import Phase


@dataclass(frozen=True)
class Span:
    """One group at one activity, in seconds since the run began."""

    group: str
    phase: str
    activity: str
    begin: float
    end: float


@dataclass(frozen=True)
class Cycles:
    """A mutual distillation, phase by phase."""

    groups: list[str]
    dev: Mapping[str, Mapping[int, float]]
    """By `group kind`, then by cycle: the best dev score of that phase."""
    agreement: Mapping[str, Mapping[str, float]]
    """By phase, then by pair of groups: Spearman, times 100, of what both scored."""
    spans: Sequence[Span]
    dropped: Mapping[str, str]

    @property
    def number(self) -> int:
        """Cycles that any group ended."""
        return max((cycle for scores in self.dev.values() for cycle in scores), default=0)

    @property
    def pairs(self) -> list[str]:
        """Pairs of groups whose scores were compared."""
        return list(dict.fromkeys(pair for row in self.agreement.values() for pair in row))


def read_cycles(run: Path, groups: Sequence[str], events: Sequence[Mapping[str, Any]]) -> Cycles:
    """From a run's ledger and events."""
    ledger = PhaseStore(run)
    dev: dict[str, dict[int, float]] = {}
    agreement: dict[str, dict[str, float]] = {}
    number = 0
    while posted := ledger.posted(phase := Phase(number)):
        for group, entry in posted.items():
            if entry.get("dev") is not None:
                dev.setdefault(f"{group} {phase.kind}", {})[phase.cycle] = entry["dev"]
        scores = {group: ledger.scores(group, phase).astype(np.float64) for group in groups if group in posted}
        compared = {f"{a} – {b}": spearman(scores[a], scores[b]) for a, b in combinations(scores, 2)}
        if compared:
            agreement[phase.name] = compared
        number += 1
    ordered = {name: dev[name] for group in groups for name in (f"{group} bi", f"{group} cross") if name in dev}
    return Cycles(list(groups), ordered, agreement, _spans(events), ledger.dropped)


def _spans(events: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Each activity lasts until its group's next one. A run that was resumed has a gap."""
    spans: list[Span] = []
    open_: dict[str, tuple[str, str, float]] = {}
    began = events[0]["time"] if events else 0.0
    for event in events:
        if event["event"] == "Note" and event["text"].startswith("run directory"):
            open_.clear()
        if event["event"] != "Doing":
            continue
        group, now = event["group"], event["time"] - began
        if group in open_:
            phase, activity, since = open_[group]
            spans.append(Span(group, phase, activity, since, now))
        open_[group] = (event["phase"], event["activity"], now)
    return spans
