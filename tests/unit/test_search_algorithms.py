"""Search algorithms of Ray Tune, and the status of its trials, without a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from ray.exceptions import RayTaskError

from distcse.cluster import tune
from distcse.cluster.tune import TrialListener, tpe, trial_scheduler
from distcse.errors import DistcseError, ModelOutputError, StorageWriteError
from distcse.events import Event, LogMessage, Reporter, WaitWarning
from distcse.recipe import Recipe, load_recipe
from distcse.storage import open_store
from distcse.tuning.records import Trial, TrialMetric, read_trials
from distcse.tuning.space import Space
from distcse.tuning.trial import TrialContext
from distcse.tuning.trial_resources import TrialResources
from tests.failures import fails_with
from tests.sweeps import LR, TAU2, make_sweep

ONE = TrialResources(concurrent=1, cpus=1.0, gpus=0.5, workers=1)


def test_tpe_samples_near_good_trials(recipe_with: Callable[..., Recipe], tmp_path: Path) -> None:
    """The scores are best at tau2 = 0.05 and equal weights, so its samples get closer to both."""
    parameters = {TAU2: {"log_uniform": [0.005, 0.5]}, "teachers.encoders.*.alpha": {"simplex": True}}
    sweep = make_sweep(tmp_path, parameters, search={"trials": 60, "n_startup_trials": 10})
    space = Space(sweep, recipe_with())
    searcher = tpe(space, sweep)
    far = []
    for number in range(60):
        found = space.values(searcher.suggest(str(number)))
        weight = found["teachers.encoders.0.alpha"]
        far.append(abs(math.log(found[TAU2] / 0.05)) + abs(weight - 0.5))
        searcher.on_trial_complete(str(number), {"best": -far[-1]})
    assert np.mean(far[-20:]) < np.mean(far[:10]) / 2


def test_pbt_keeps_a_choice_among_its_values(recipe_with: Callable[..., Recipe], tmp_path: Path) -> None:
    """Ray Tune's own exploration, 200 times."""
    from ray.tune.schedulers.pbt import _explore

    parameters = {LR: {"values": [2e-5, 3e-5, 5e-5]}, TAU2: {"log_uniform": [0.01, 0.1]}}
    search, schedule = {"algorithm": "random"}, {"kind": "pbt"}
    space = Space(sweep := make_sweep(tmp_path, parameters, search=search, schedule=schedule), recipe_with())
    mutations = trial_scheduler(sweep, space)._hyperparam_mutations
    chosen = {LR: 3e-5, TAU2: 0.05}
    seen = set()
    for _ in range(200):
        chosen, _ = _explore(chosen, mutations, 0.25, (1.2, 0.8), space.clip)
        seen.add(chosen[LR])
        assert 0.01 <= chosen[TAU2] <= 0.1
    assert seen == {2e-5, 3e-5, 5e-5}


def test_a_final_run_that_fails_after_its_last_score_is_not_finished(tmp_path: Path) -> None:
    scored = [TrialMetric(10, 100.0, 80.0, 1.0)]
    for keep_models, status, expected in (
        (True, "failed", "failed"),
        (True, "stopped", "stopped"),
        (False, "failed", "failed"),
        (False, "stopped", "finished"),
    ):
        folder = tmp_path / f"{keep_models}-{status}"
        (folder / "one").mkdir(parents=True)
        Trial("one", {}, metrics=scored).write(open_store(folder / "one"))
        context = TrialContext(
            load_recipe("minilm-3layer", ["evaluation.data=data"]), open_store(folder), keep_models=keep_models
        )
        TrialListener(context, Reporter(), ONE).note_end("one", status, "No space left on device")  # type: ignore[arg-type]
        (record,) = read_trials(open_store(folder))
        assert record.status == expected


@pytest.mark.parametrize(
    ("error", "status"), [(StorageWriteError("the disk is full"), "running"), (ModelOutputError("no output"), "failed")]
)
def test_a_trial_that_storage_ends_is_not_failed_for_good_and_ends_the_sweep(
    error: DistcseError, status: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "one").mkdir()
    Trial("one", {}).write(open_store(folder))
    (tmp_path / "error.pkl").write_bytes(ray.cloudpickle.dumps(RayTaskError("trial", "traceback", error)))
    (tmp_path / "error.txt").write_text(str(error))
    trial = SimpleNamespace(
        trial_id="one",
        status="ERROR",
        error_file=str(tmp_path / "error.txt"),
        pickled_error_file=str(tmp_path / "error.pkl"),
    )
    context = TrialContext(load_recipe("minilm-3layer", ["evaluation.data=data"]), open_store(tmp_path))
    listener = TrialListener(context, Reporter(), ONE)
    listener.on_trial_error(1, [trial], trial)
    (record,) = read_trials(open_store(tmp_path))
    assert record.status == status
    with fails_with(StorageWriteError, "disk") if status == "running" else nullcontext():
        listener.on_step_end(1, [trial])


def test_a_sweep_without_a_running_trial_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "WaitWarning", partial(WaitWarning, after_s=-1.0))
    events: list[Event] = []
    context = TrialContext(load_recipe("minilm-3layer", ["evaluation.data=data"]), open_store(tmp_path))
    listener = TrialListener(context, Reporter(events.append), ONE)
    running, waiting, ended = (SimpleNamespace(status=status) for status in ("RUNNING", "PENDING", "TERMINATED"))
    for trials, number in (([running, waiting], 0), ([ended], 0), ([waiting, ended], 1), ([waiting], 1)):
        listener.on_step_end(1, trials)
        assert len(events) == number
    (event,) = events
    assert isinstance(event, LogMessage) and "a node with 1 CPU and 0.5 GPUs free; see `ray status`" in event.text
