"""Small sweeps: a space of one or two parameters, and the trials' recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from distcse.cluster.sweep import run_sweep
from distcse.events import Reporter
from distcse.recipe import MutualRecipe, Recipe, Sweep, read_sweep
from distcse.tuning.sweep import SweepResult, begin

TAU2, LR = "objective.rank.tau2", "training.lr"
ON_RAY = (
    "training.workers=1",
    "training.log_every=2",
    "training.cpus_per_worker=1",
    "teachers.embedding_workers=1",
    "evaluation.final_suites=[]",
)


def make_sweep(folder: Path, parameters: dict[str, Any], **sections: Any) -> Sweep:
    file = folder / "space.yaml"
    sections = {"schedule": {"kind": "none"}, "final_runs": {"seeds": []}, "loggers": [], **sections}
    file.write_text(yaml.safe_dump({"name": "small", "parameters": parameters, **sections}, sort_keys=False))
    return read_sweep(str(file))


def run_new_sweep(recipe: Recipe | MutualRecipe, sweep: Sweep, reporter: Reporter | None = None) -> SweepResult:
    return run_sweep(recipe, sweep, begin(recipe, sweep), reporter or Reporter())
