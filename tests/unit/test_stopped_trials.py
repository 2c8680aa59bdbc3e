"""A trial that is asked to stop, as on a node that Ray drains, and starts again elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distcse.errors import StoppedEarlyError
from distcse.storage import open_store
from distcse.training.checkpoints import CheckpointStore
from distcse.tuning.records import Trial, read_trial
from distcse.tuning.trial import TrialContext, run_trial
from tests.jobs import embed_tables, make_recipe
from tests.pairs import make_mutual_recipe

LR = "training.lr"
LONGER = ("training.log_every=1", "evaluation.final_suites=[]")


def steps_of(folder: Path) -> list[int]:
    """Return the steps that a trial reported, in the order of the reports."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["step"] for event in events if event["event"] == "StepReport"]


def run(context: TrialContext, name: str, values: dict[str, Any], stop_requested: Callable[[], bool]) -> Trial:
    return run_trial(context, name, values, lambda metrics: None, stop_requested=stop_requested)


def test_a_stopped_trial_continues_from_its_checkpoint(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, *LONGER)
    embed_tables(recipe)
    context = TrialContext(recipe, open_store(tmp_path / "trials"))
    folder = context.trials.path / "moved"

    def has_steps() -> bool:
        return (folder / "events.jsonl").exists() and len(steps_of(folder)) > 8

    with pytest.raises(StoppedEarlyError):
        run(context, "moved", {LR: 1e-3}, has_steps)
    stopped, done = read_trial(open_store(folder)), steps_of(folder)
    assert stopped is not None and stopped.status == "running" and not stopped.ended
    checkpoint = CheckpointStore(open_store(folder)).latest()
    assert checkpoint is not None and checkpoint.name.endswith(str(done[-1]))
    moved = run(context, "moved", {LR: 1e-3}, lambda: False)
    other = TrialContext(
        recipe, open_store(tmp_path / "others")
    )  # in one folder, it would take the scores of its equal
    undisturbed = run(other, "undisturbed", {LR: 1e-3}, lambda: False)
    assert (moved.status, moved.num_starts) == ("finished", 2)
    assert steps_of(folder) == sorted(set(steps_of(folder))) and steps_of(folder)[len(done)] == done[-1] + 1
    assert [(metric.step, metric.score) for metric in moved.metrics] == [
        (metric.step, metric.score) for metric in undisturbed.metrics
    ]


@pytest.mark.slow
def test_a_stopped_trial_takes_another_trials_checkpoint_but_not_its_own_older_one(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    """Ray Tune passes a trial that starts again the last checkpoint that it reported, or another trial's with new values."""
    recipe = make_recipe(
        tmp_path, tiny("bert"), [tiny("minilm")], sentences, *LONGER, "evaluation.eval_steps=3", "training.engine=torch"
    )
    embed_tables(recipe)
    context = TrialContext(recipe, open_store(tmp_path / "trials"), exchanges_checkpoints=True)
    folder, donor = context.trials.path / "moved", tmp_path / "donor"

    def report(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 6:
            shutil.copytree(metrics["checkpoint"], donor, dirs_exist_ok=True)

    def has_steps(number: int) -> bool:
        return (folder / "events.jsonl").exists() and len(steps_of(folder)) >= number

    def start(lr: float, steps: int) -> list[int]:
        """Return the steps that the trial takes until it is asked to stop."""
        known = donor if donor.exists() else None
        done = steps_of(folder) if has_steps(1) else []
        with pytest.raises(StoppedEarlyError):
            run_trial(context, "moved", {LR: lr}, report, known, lambda: has_steps(len(done) + steps))
        return steps_of(folder)[len(done) :]

    first = start(1e-3, 8)
    assert first[-1] > 6 and first[-1] % 3
    second = start(1e-3, 2)
    assert second[0] == first[-1] + 1
    assert start(2e-3, 2)[0] == 7  # other values: the checkpoint is the one of step 6, from which the trial continues


def test_a_stopped_trial_of_groups_is_not_finished(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    recipe = make_mutual_recipe(
        tmp_path, models, sentences, "mutual.cycles=1", "bi.epochs=1", "evaluation.final_suites=[]"
    )
    context = TrialContext(recipe, open_store(tmp_path / "trials"))
    with pytest.raises(StoppedEarlyError):
        run(context, "moved", {}, lambda: (context.trials.path / "moved" / "groups").exists())
    moved = run(context, "moved", {}, lambda: False)
    assert (moved.status, moved.num_starts) == ("finished", 2)
