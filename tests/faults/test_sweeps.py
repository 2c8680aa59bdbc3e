"""Sweeps whose trials are killed, diverge or are stopped, whose driver is killed, or whose state is damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse import cli
from distcse.cli.training import status_of
from distcse.cluster.sweep import run_sweep
from distcse.devices.process import INTERRUPTED
from distcse.errors import DivergedError, ResumeMismatchError
from distcse.events import Event, LogMessage, Reporter, StageProgress, TrialUpdate
from distcse.recipe import Recipe
from distcse.report.sweep_page import rows_of, write_sweep_pages
from distcse.tuning.records import read_trials
from distcse.tuning.sweep import begin
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import embed_tables, make_recipe
from tests.kills import kill_actor
from tests.sweeps import LR, ON_RAY, make_sweep, run_new_sweep

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None) -> Recipe:
    made = make_recipe(tmp_path, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences, *ON_RAY)
    embed_tables(made)
    return made


def test_trials_that_are_killed_diverge_or_are_stopped(recipe: Recipe, tmp_path: Path) -> None:
    """In a sweep that is interrupted, as by Ctrl-C, and resumed."""
    progress: list[float] = []
    killed: list[str] = []

    def record_progress(event: Event) -> None:
        if isinstance(event, TrialUpdate):
            progress.append(event.progress)

    def kill(event: Event) -> None:
        if not isinstance(event, TrialUpdate) or event.progress <= 50 or event.values[LR] != 1e-3:
            return
        if not killed and kill_actor("ImplicitFunc"):
            killed.append(event.trial)

    parameters = {LR: {"values": [1e-3, 1e-6, 2e-6]}, "objective.rank.gamma": {"values": [1.0, 1e39]}}
    sweep = make_sweep(
        tmp_path,
        parameters,
        search={"algorithm": "grid", "concurrent": 1},
        schedule={"kind": "asha", "grace_period": 0.5, "reduction_factor": 1.5},
    )
    longer = recipe.model_copy(update={"training": recipe.training.model_copy(update={"epochs": 2})})
    directory = begin(longer, sweep)
    interrupted = run_sweep(longer, sweep, directory, Reporter(record_progress, lambda: max(progress, default=0) > 10))
    assert interrupted.interrupted and not interrupted.final_results and interrupted.evaluation is None
    assert [trial.status for trial in interrupted.trials] == ["running"]
    assert (directory / "trials.csv").exists()
    result = run_sweep(longer, sweep, directory, Reporter(kill))
    found = {(trial.values[LR], trial.values["objective.rank.gamma"]): trial for trial in result.trials}
    assert {trial.status for (_, gamma), trial in found.items() if gamma == 1e39} == {"diverged"}
    assert DivergedError.code in found[1e-3, 1e39].reason
    assert killed == [found[1e-3, 1.0].name]
    assert found[1e-3, 1.0].status == "finished" and found[1e-3, 1.0].num_starts == 3
    assert "stopped" in {trial.status for trial in result.trials}  # hardly learns, and started later
    assert result.best_trial is not None and result.best_trial.values == {LR: 1e-3, "objective.rank.gamma": 1.0}
    steps = [entry.step for entry in result.best_trial.metrics]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == 44
    events = (directory / "trials" / killed[0] / "events.jsonl").read_text().splitlines()
    scored = [event["step"] for event in map(json.loads, events) if event["event"] == "DevScore"]
    assert scored.count(0) == 1  # resumed from its checkpoint twice


def test_a_stop_in_the_final_evaluation_keeps_what_is_measured(recipe: Recipe, tmp_path: Path, labelled: Path) -> None:
    evaluation = recipe.evaluation.model_copy(
        update={"data": str(labelled), "dev": "agreement", "final_suites": ["sts"]}
    )
    recipe = recipe.model_copy(update={"evaluation": evaluation})
    sweep = make_sweep(
        tmp_path,
        {LR: {"values": [1e-3]}},
        search={"algorithm": "grid", "concurrent": 1},
        final_runs={"seeds": [1, 2]},
    )
    directory, events = begin(recipe, sweep), list[Event]()

    def measured() -> list[str]:
        named = (event.name for event in events if isinstance(event, StageProgress) and ", seed " in event.name)
        return list(dict.fromkeys(named))

    reporter = Reporter(events.append, lambda: len(measured()) > 2)
    stopped = run_sweep(recipe, sweep, directory, reporter)
    names = ["recipe, seed 1", "recipe, seed 2", "best, seed 1", "best, seed 2"]
    assert stopped.interrupted and len(stopped.final_results) == 4 and status_of(stopped) == INTERRUPTED
    assert stopped.evaluation is not None and [model.name for model in stopped.evaluation.models] == names[:2]
    pages = write_sweep_pages(stopped)
    assert {(row.suite, *sorted(row.spreads)) for row in rows_of(stopped)} >= {
        ("dev", "best", "recipe"),
        ("sts", "recipe"),
    }
    assert "evaluation of best, seed 1: stopped" in pages[1].read_text()
    (line,) = (event.text for event in events if isinstance(event, LogMessage) and "stopped before" in event.text)
    assert "evaluation of best, seed 1, evaluation of best, seed 2; continue with --resume" in line
    events.clear()
    done = run_sweep(recipe, sweep, directory, Reporter(events.append))
    assert not done.interrupted and measured() == names[2:]
    assert done.evaluation is not None and [model.name for model in done.evaluation.models] == names


def test_a_search_ends_when_its_hours_are_over(recipe: Recipe, tmp_path: Path) -> None:
    parameters = {LR: {"log_uniform": [1e-5, 1e-3]}}
    search = {"algorithm": "random", "trials": 200, "hours": 25 / 3600, "concurrent": 1}
    sweep = make_sweep(tmp_path, parameters, search=search)
    longer = recipe.model_copy(update={"training": recipe.training.model_copy(update={"epochs": 4})})
    result = run_new_sweep(longer, sweep)
    assert 0 < len(result.trials) < 200 and not result.interrupted
    assert {trial.status for trial in result.trials} <= {"finished", "stopped"} and result.best_trial is not None


def test_a_damaged_state_of_ray_tune_is_not_restored(recipe: Recipe, tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, {LR: {"values": [1e-3, 1e-4]}}, search={"algorithm": "grid", "concurrent": 1})
    directory = begin(recipe, sweep)
    first = run_sweep(recipe, sweep, directory, Reporter())
    (state,) = (directory / "ray_tune" / "search").glob("experiment_state-*.json")
    state.write_text(state.read_text()[:100])
    again = run_sweep(recipe, sweep, directory, Reporter())
    assert [trial.reused_from for trial in again.trials[2:]] == [trial.name for trial in first.trials]
    assert again.best_trial == first.best_trial
    (tmp_path / "corpus.txt").write_text("\n".join(f"Other text, row {row}." for row in range(300)))
    with fails_with(ResumeMismatchError, "corpus", str(directory)):
        run_sweep(recipe, sweep, directory, Reporter())


def test_a_resumed_sweep_does_not_repeat_ended_trials_of_a_killed_driver(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = tmp_path / "space.yaml"
    rates = [1e-3, 3e-4, 1e-5]
    make_sweep(tmp_path, {LR: {"values": rates}}, search={"algorithm": "grid", "concurrent": 1})
    undisturbed = {}
    for rate in rates:
        alone = recipe.training.model_copy(update={"workers": 0, "lr": rate})
        best = run(recipe.model_copy(update={"training": alone}), Reporter()).train_result.state.best
        assert best is not None
        undisturbed[rate] = best[1]

    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RAY_API_SERVER_ADDRESS"):
        environment.pop(name, None)
    runs = tmp_path / "elsewhere"
    arguments = [str(tmp_path / "recipe.yaml"), "--space", str(space), *ON_RAY, f"storage.runs={runs}"]
    command = [sys.executable, "-m", "distcse.tune", *arguments]
    with open(tmp_path / "log.txt", "w") as log:
        driver = subprocess.Popen(command, env=environment, stderr=log, stdout=log)
        ended: set[str] = set()
        deadline = time.monotonic() + 240
        while not ended and time.monotonic() < deadline and driver.poll() is None:
            time.sleep(0.1)
            folders = list(runs.glob("*/trials"))
            ended = {t.name for t in read_trials(folders[0]) if t.ended} if folders else set()
        driver.kill()
        driver.wait()
    assert ended, (tmp_path / "log.txt").read_text()
    (folder,) = runs.iterdir()
    before = {t.name: t for t in read_trials(folder / "trials")}
    assert len(before) < 3
    assert cli.main(["tune", "--resume", str(folder)]) == 0
    after = {t.name: t for t in read_trials(folder / "trials")}
    assert len(after) == 3 and all(trial.status == "finished" for trial in after.values())
    for name in ended:
        assert after[name] == before[name]  # including its seconds
    best_trial = max(after.values(), key=lambda t: t.best.score if t.best else 0)
    assert best_trial.values == {LR: max(undisturbed, key=undisturbed.__getitem__)}
    for trial in after.values():
        assert trial.best is not None
        assert trial.best.score == pytest.approx(undisturbed[trial.values[LR]], abs=0.05)
    assert f"distcse train {folder / 'best.yaml'}" in capsys.readouterr().out
