"""Sweeps on a real Ray cluster: one teacher pass, trials that are killed, that diverge, sweeps that are stopped and go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from distcse.events import Event, Stage, TrialNews, Watch
from distcse.recipe import Recipe, Sweep, read_recipe, read_sweep
from distcse.tuning.sweep import SweepResult, begin, reopen, run_sweep
from tests.jobs import make_recipe

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None) -> Recipe:
    knobs = ("training.workers=1", "training.log_every=2", "evaluation.final=[]", "training.cpus_per_worker=1")
    return make_recipe(tmp_path, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences, *knobs)


def make_sweep(folder: Path, knobs: dict[str, Any], **sections: Any) -> Sweep:
    file = folder / "space.yaml"
    file.write_text(yaml.safe_dump({"name": "small", "knobs": knobs, **sections}))
    return read_sweep(str(file))


def test_a_grid_takes_one_teacher_pass(recipe: Recipe, tmp_path: Path) -> None:
    sweep = make_sweep(
        tmp_path,
        {
            "objective.rank.tau2": {"values": [0.05, 0.1]},
            "objective.rank.tau3": {"equals": "tau2 / 2"},
            "training.lr": {"values": [1e-3, 1e-4]},
        },
        search={"algorithm": "grid", "concurrent": 2},
        schedule={"kind": "none"},
        winner={"seeds": [1, 2]},
    )
    events: list[Event] = []
    result = run_sweep(recipe, sweep, begin(recipe, sweep), Watch(events.append))
    print([(t.name, t.values, t.status, t.best) for t in result.trials])
    print([(t.name, t.values, t.status, t.best) for t in result.winners])
    assert len(result.trials) == 4
