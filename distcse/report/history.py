"""What a run told while it worked, read back from its directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from distcse.errors import RunDirectoryError, RunError
from distcse.report.cycles import Cycles, read_cycles
from distcse.runs.directory import recorded


@dataclass(frozen=True)
class History:
    """Curves and circumstances of one run."""

    name: str
    losses: dict[str, list[tuple[int, float]]]
    """By part of the loss: (step, value)."""
    dev_name: str
    dev: list[tuple[int, float]]
    stages: list[tuple[str, float, str]]
    """Stages in their order: name, seconds, what was done."""
    recipe: str
    versions: dict[str, str]
    circumstances: dict[str, str]
    """Commit, platform, corpus fingerprint, seed."""
    seconds: float
    """From the first event to the last."""
    cycles: Cycles | None = None
    """What the groups of a mutual distillation did."""

    @property
    def best(self) -> tuple[int, float] | None:
        """The best dev score, the earlier of equals."""
        return max(self.dev, key=lambda entry: (entry[1], -entry[0])) if self.dev else None


def read_run(path: Path) -> History:
    """The history of a run directory; of steps told twice, after a resume, the later report counts.

    Raises:
        RunError: The directory lacks its record.
    """
    try:
        noted = recorded(path)
        recipe = (path / "recipe.yaml").read_text(encoding="utf-8")
        events = list(_events(path / "events.jsonl"))
    except (OSError, ValueError, RunError) as lacking:
        raise RunDirectoryError(f"{path} cannot be read as a run: {lacking}") from None
    losses: dict[str, dict[int, float]] = {}
    dev: dict[int, float] = {}
    stages: list[tuple[str, float, str]] = []
    dev_name, before, training, grouped = "", events[0]["time"] if events else 0.0, 0.0, 0.0
    for event in events:
        kind, time = event["event"], event["time"]
        if "group" in event:
            grouped, before = grouped + time - before, time  # side by side with others: told in the cycles
            continue
        if kind == "Steps":
            for part, value in event["losses"].items():
                losses.setdefault(part, {})[event["step"]] = value
            training += time - before
        elif kind == "DevScore":
            dev_name, dev[event["step"]] = event["name"], event["score"]
            training += time - before
        elif kind == "Stage" and event["finished"]:
            stages.append((event["name"], time - before, event["note"]))
        elif kind == "Stage":
            continue  # its time belongs to the stage's end
        before = time
    document = yaml.safe_load(recipe)
    groups = [group["name"] for group in document.get("groups", [])]
    last = max((step for values in losses.values() for step in values), default=0)
    at = next((place for place, stage in enumerate(stages) if stage[0] in ("exposure", "start")), len(stages))
    if last:
        stages.insert(at, ("training", training, f"{last:,} steps, dev scores included"))
    if groups:
        stages.insert(at, ("groups", grouped, f"{len(groups)} side by side: training, scoring, waiting"))
    return History(
        name=path.name,
        losses={part: sorted(values.items()) for part, values in losses.items()},
        dev_name=dev_name,
        dev=sorted(dev.items()),
        stages=stages,
        recipe=recipe,
        versions=noted["versions"],
        circumstances={
            "seed": str(document["seed"]),
            "commit": _commit(noted),
            "platform": noted["platform"],
            "Python": noted["python"],
            **noted["data"],
        },
        seconds=events[-1]["time"] - events[0]["time"] if events else 0.0,
        cycles=read_cycles(path, groups, events) if groups else None,
    )


def _commit(noted: dict[str, Any]) -> str:
    commit = noted["commit"] or "not from a checkout"
    return f"{commit}, with changes" if noted["changed"] else commit


def _events(file: Path) -> Iterator[dict[str, Any]]:
    """Its lines; one that a kill or a full disk cut short is left out: what it told was told again, or did not happen."""
    with open(file, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(ValueError):
                yield json.loads(line)
