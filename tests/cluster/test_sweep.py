"""Sweeps on a real Ray cluster: one embedding pass, trials that are killed, stopped or diverge, and resumed sweeps."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import yaml

from distcse.errors import ClusterTooSmallError, DivergedError, RunDirectoryError, SearchSpaceError
from distcse.events import Event, Reporter, StageProgress, TrialUpdate
from distcse.experiments.distillation.run import run
from distcse.models import Encoder
from distcse.recipe import MutualRecipe, Recipe, Sweep, load_recipe, read_recipe, read_sweep
from distcse.report.sweep_page import write_sweep_pages
from distcse.tuning.ray_tune import _Listener, _scheduler, search, tpe
from distcse.tuning.records import Trial, TrialMetric, read_trials
from distcse.tuning.space import Space
from distcse.tuning.sweep import SweepResult, begin, reopen, run_sweep
from distcse.tuning.trial import TrialContext
from distcse.tuning.trial_resources import trial_resources
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.kills import kill_actor
from tests.pairs import make_mutual_recipe

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TAU2, LR = "objective.rank.tau2", "training.lr"
ON_RAY = (
    "training.workers=1",
    "training.log_every=2",
    "training.cpus_per_worker=1",
    "teachers.embedding_workers=1",
    "evaluation.final_suites=[]",
)


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None) -> Recipe:
    return make_recipe(tmp_path, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences, *ON_RAY)


def make_sweep(folder: Path, parameters: dict[str, Any], **sections: Any) -> Sweep:
    file = folder / "space.yaml"
    sections = {"schedule": {"kind": "none"}, "final_runs": {"seeds": []}, "loggers": [], **sections}
    file.write_text(yaml.safe_dump({"name": "small", "parameters": parameters, **sections}, sort_keys=False))
    return read_sweep(str(file))


def run_new_sweep(recipe: Recipe | MutualRecipe, sweep: Sweep, reporter: Reporter | None = None) -> SweepResult:
    return run_sweep(recipe, sweep, begin(recipe, sweep), reporter or Reporter())


def embedded(events: list[Event]) -> list[int]:
    return [e.done for e in events if isinstance(e, StageProgress) and e.finished and e.name.startswith("teacher")]


def test_a_grid_embeds_once_and_trains_the_best_trial_again(recipe: Recipe, tmp_path: Path, labelled: Path) -> None:
    recipe = read_recipe(
        str(tmp_path / "recipe.yaml"),
        [*ON_RAY, f"evaluation.data={labelled}", "evaluation.dev=agreement", "evaluation.final_suites=[sts]"],
    )
    assert isinstance(recipe, Recipe)
    parameters = {
        TAU2: {"values": [0.05, 0.1]},
        "objective.rank.tau3": {"expression": "tau2 / 2"},
        LR: {"values": [1e-3, 1e-5]},
    }
    sweep = make_sweep(
        tmp_path,
        parameters,
        search={"algorithm": "grid", "concurrent": 2},
        final_runs={"seeds": [1]},
        loggers=["tensorboard"],
    )
    events: list[Event] = []
    result = run_new_sweep(recipe, sweep, Reporter(events.append))
    rows = next(
        event.done for event in events if isinstance(event, StageProgress) and event.name == "corpus" and event.finished
    )
    assert embedded(events) == [rows, rows]  # two teachers, each row once, for six training runs
    assert [trial.status for trial in result.trials] == ["finished"] * 4
    assert {(t.values[TAU2], t.values["objective.rank.tau3"]) for t in result.trials} == {(0.05, 0.025), (0.1, 0.05)}
    best_trial = result.best_trial
    assert best_trial is not None and best_trial.best is not None
    assert best_trial.best.score == max(entry.score for trial in result.trials for entry in trial.reported)

    best = load_recipe(str(result.best_recipe))
    assert best.objective.rank is not None and best.objective.rank.tau2 == best_trial.values[TAU2]
    assert best.training.lr == best_trial.values[LR] and best.evaluation.final_suites == ["sts"]
    assert pyarrow.parquet.read_table(result.directory / "trials.parquet").num_rows == 4
    assert sorted(len(trial.values) for trial in result.final_results) == [
        1,
        4,
    ]  # the original recipe and the best trial
    for trial in result.final_results:
        assert Encoder.load(result.directory / "winners" / trial.name / "model").encode(["A cat."]).shape == (1, 32)
    assert result.evaluation is not None
    assert [about.name for about in result.evaluation.models] == ["recipe, seed 1", "best, seed 1"]
    assert list((result.directory / "search").rglob("events.out.tfevents*"))
    assert not list((result.directory / "trials").rglob("checkpoints"))
    page, text = (file.read_text() for file in write_sweep_pages(result))
    for title in (
        "Best trial",
        "Final runs",
        "Values and dev score",
        "Temperatures",
        "Learning curves",
        "Cost of each trial",
    ):
        assert title in page
    assert "| recipe | best |" in text and "4 finished" in text

    later: list[Event] = []
    again = make_sweep(tmp_path, {TAU2: {"values": [0.05, 0.05, 0.2]}}, search={"algorithm": "grid", "concurrent": 1})
    second = run_new_sweep(recipe, again, Reporter(later.append))
    assert embedded(later) == [0, 0]
    assert [bool(trial.recalled_from) for trial in second.trials] == [False, True, False]
    assert second.trials[1].reported == second.trials[0].reported


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
    assert DivergedError.code in found[1e-3, 1e39].why
    assert killed == [found[1e-3, 1.0].name]
    assert found[1e-3, 1.0].status == "finished" and found[1e-3, 1.0].starts == 3
    assert "stopped" in {trial.status for trial in result.trials}  # hardly learns, and started later
    assert result.best_trial is not None and result.best_trial.values == {LR: 1e-3, "objective.rank.gamma": 1.0}
    steps = [entry.step for entry in result.best_trial.reported]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == 44
    events = (directory / "trials" / killed[0] / "events.jsonl").read_text().splitlines()
    scored = [event["step"] for event in map(json.loads, events) if event["event"] == "DevScore"]
    assert scored.count(0) == 1  # resumed from its checkpoint twice


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
    (state,) = (directory / "search").glob("experiment_state-*.json")
    state.write_text(state.read_text()[:100])
    again = run_sweep(recipe, sweep, directory, Reporter())
    assert [trial.recalled_from for trial in again.trials[2:]] == [trial.name for trial in first.trials]
    assert again.best_trial == first.best_trial


def test_tpe_samples_near_good_trials(recipe: Recipe, tmp_path: Path) -> None:
    """The scores are best at tau2 = 0.05 and equal weights, so its samples get closer to both."""
    parameters = {TAU2: {"log_uniform": [0.005, 0.5]}, "teachers.encoders.*.alpha": {"simplex": True}}
    sweep = make_sweep(tmp_path, parameters, search={"trials": 60, "n_startup_trials": 10})
    space = Space(sweep, recipe)
    searcher = tpe(space, sweep)
    far = []
    for number in range(60):
        found = space.values(searcher.suggest(str(number)))
        weight = found["teachers.encoders.0.alpha"]
        far.append(abs(math.log(found[TAU2] / 0.05)) + abs(weight - 0.5))
        searcher.on_trial_complete(str(number), {"best": -far[-1]})
    assert np.mean(far[-20:]) < np.mean(far[:10]) / 2


def test_tpe_with_a_trainer_of_two_workers_in_its_trial(recipe: Recipe, tmp_path: Path, labelled: Path) -> None:
    training = recipe.training.model_copy(update={"workers": 2, "max_steps": 12})
    evaluation = recipe.evaluation.model_copy(update={"data": str(labelled)})
    two = recipe.model_copy(update={"training": training, "evaluation": evaluation})
    parameters = {TAU2: {"log_uniform": [0.02, 0.2]}, "teachers.encoders.*.alpha": {"simplex": True}}
    sweep = make_sweep(tmp_path, parameters, search={"trials": 1, "concurrent": 1})
    (trial,) = run_new_sweep(two, sweep).trials
    assert trial.status == "finished" and trial.reported[-1].progress == 100
    weights = [trial.values[f"teachers.encoders.{n}.alpha"] for n in range(2)]
    assert sum(weights) == pytest.approx(1) and 0.02 <= trial.values[TAU2] <= 0.2


def test_pbt_trials_continue_from_better_ones(recipe: Recipe, tmp_path: Path) -> None:
    parameters = {LR: {"log_uniform": [1e-6, 1e-3]}, TAU2: {"values": [0.05, 0.1]}}
    sweep = make_sweep(
        tmp_path,
        parameters,
        search={"algorithm": "random", "trials": 4, "concurrent": 2},
        schedule={"kind": "pbt", "grace_period": 0.25},
    )
    drawn: dict[str, set[float]] = {}

    def note(event: Event) -> None:
        if isinstance(event, TrialUpdate):
            drawn.setdefault(event.trial, set()).add(event.values[LR])

    longer = recipe.model_copy(update={"training": recipe.training.model_copy(update={"epochs": 2})})
    result = run_new_sweep(longer, sweep, Reporter(note))
    assert [trial.status for trial in result.trials] == ["finished"] * 4
    assert all(1e-6 <= rate <= 1e-3 for rates in drawn.values() for rate in rates)
    assert any(
        len(rates) > 1 for rates in drawn.values()
    )  # a trial continued from another's checkpoint with other values
    assert all(trial.reported[-1].progress == 100 for trial in result.trials)
    assert {trial.values[TAU2] for trial in result.trials} <= {0.05, 0.1}
    page, _ = write_sweep_pages(result)
    assert "tau2" in page.read_text()


def test_a_trial_without_a_gpu_sees_none(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, Ray lets an actor without a GPU see all GPUs of its node."""

    def look(
        context: TrialContext, name: str, values: dict[str, Any], report: Callable[..., None], donor: Path | None
    ) -> None:
        (context.trials / name).mkdir(parents=True)
        (context.trials / name / "seen").write_text(repr(os.environ.get("CUDA_VISIBLE_DEVICES")))

    monkeypatch.setattr("distcse.tuning.ray_tune.run_trial", look)
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.gpus_per_worker=0")
    sweep = make_sweep(tmp_path, {LR: {"values": [1e-3]}}, search={"algorithm": "grid", "concurrent": 1})
    context, resources = TrialContext(recipe, tmp_path / "trials"), trial_resources(recipe, sweep)
    search(context, Space(sweep, recipe), sweep, tmp_path / "search", resources, Reporter())
    (seen,) = (tmp_path / "trials").glob("*/seen")
    assert seen.read_text() == "''"


def test_pbt_keeps_a_choice_among_its_values(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    """Ray Tune's own exploration, 200 times."""
    from ray.tune.schedulers.pbt import _explore

    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences)
    parameters = {LR: {"values": [2e-5, 3e-5, 5e-5]}, TAU2: {"log_uniform": [0.01, 0.1]}}
    search, schedule = {"algorithm": "random"}, {"kind": "pbt"}
    space = Space(sweep := make_sweep(tmp_path, parameters, search=search, schedule=schedule), recipe)
    mutations = _scheduler(sweep, space)._hyperparam_mutations
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
        Trial("one", {}, reported=scored).write(folder / "one")
        context = TrialContext(load_recipe("minilm-3layer", ["evaluation.data=data"]), folder, keep_models=keep_models)
        _Listener(context, Reporter()).note_end("one", status, "No space left on device")  # type: ignore[arg-type]
        (record,) = read_trials(folder)
        assert record.status == expected


def test_a_sweep_of_a_mutual_distillation(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None
) -> None:
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    recipe = make_mutual_recipe(tmp_path, models, sentences, "evaluation.final_suites=[]")
    sweep = make_sweep(
        tmp_path,
        {"bi.lr": {"values": [1e-3, 1e-5]}, "mutual.cycles": {"values": [1, 2]}},
        search={"algorithm": "grid", "concurrent": 2},
    )
    result = run_new_sweep(recipe, sweep)
    assert [trial.status for trial in result.trials] == ["finished"] * 4
    assert {(len(t.reported), t.values["mutual.cycles"]) for t in result.trials} == {(1, 1), (2, 2)}
    assert all(trial.reported[-1].progress == 100 for trial in result.trials)


def test_a_resumed_sweep_does_not_repeat_ended_trials_of_a_killed_driver(recipe: Recipe, tmp_path: Path) -> None:
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
    command = [sys.executable, "-m", "distcse.tune", "--resume", str(folder)]
    resumed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert resumed.returncode == 0, resumed.stderr
    after = {t.name: t for t in read_trials(folder / "trials")}
    assert len(after) == 3 and all(trial.status == "finished" for trial in after.values())
    for name in ended:
        assert after[name] == before[name]  # including its seconds
    best_trial = max(after.values(), key=lambda t: t.best.score if t.best else 0)
    assert best_trial.values == {LR: max(undisturbed, key=undisturbed.__getitem__)}
    for trial in after.values():
        assert trial.best is not None
        assert trial.best.score == pytest.approx(undisturbed[trial.values[LR]], abs=0.05)
    assert f"python -m distcse.train {folder / 'best.yaml'}" in resumed.stdout


def test_sweeps_that_cannot_run_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, {TAU2: {"uniform": [0.05, 0.1]}}, search={"concurrent": 99})
    with fails_with(ClusterTooSmallError, "99 training workers of 1 CPU each", "search.concurrent"):
        run_new_sweep(recipe, sweep)
    two = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"workers": 2, "cpus_per_worker": None})}
    )
    resources = trial_resources(two, make_sweep(tmp_path, {TAU2: {"uniform": [0.05, 0.1]}}, search={"concurrent": 1}))
    assert resources.reserved["CPU"] + 2 * resources.cpus <= 6  # else its workers would never start
    with fails_with(SearchSpaceError, "parameters.teachers.encoders.0.alpha", "evaluation.dev=agreement"):
        run_new_sweep(recipe, make_sweep(tmp_path, {"teachers.encoders.*.alpha": {"simplex": True}}))
    with fails_with(RunDirectoryError, str(tmp_path / "nowhere"), "--resume"):
        reopen(tmp_path / "nowhere")
