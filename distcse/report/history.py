"""Reads the history of a run from its directory: curves, stages and versions."""

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
    """Read the history of a run's directory. Of steps reported twice, because the run was resumed, the later one counts.

    Raises:
        RunDirectoryError: The directory has no readable record, recipe or events of a run.
    """
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
        cycles=read_cycles(path, groups, events, document["mutual"].get("best_of", "cycles")) if groups else None,
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
