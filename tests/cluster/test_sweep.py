"""Sweeps on a Ray cluster: one embedding pass, the best trial trained again, TPE and PBT, trials and drivers that are killed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from distcse import cli
from distcse.cli.tuning import status_of
from distcse.cluster.nodes import alive
from distcse.cluster.sweep import run_sweep
from distcse.devices.process import INTERRUPTED
from distcse.errors import (
    ClusterTooSmallError,
    DivergedError,
    ResumeMismatchError,
)
from distcse.events import Event, LogMessage, Reporter, StageProgress, TrialUpdate
from distcse.models import Encoder
from distcse.recipe import Recipe, load_recipe, with_values
from distcse.report.sweep_page import rows_of, write_sweep_pages
from distcse.storage import open_store
from distcse.tuning.records import read_trials
from distcse.tuning.sweep import begin
from distcse.tuning.trial import TrialContext, run_trial
from distcse.tuning.trial_resources import trial_resources
from tests.backends import run
from tests.commands import TRAIN, user_environment
from tests.conftest import ROOT
from tests.failures import fails_with
from tests.jobs import embed_tables, make_recipe, rows_embedded
from tests.kills import kill_actor
from tests.pairs import make_mutual_recipe
from tests.sweeps import LR, ON_RAY, TAU2, make_sweep, run_new_sweep
from tests.tensorboard import scalars

pytestmark = pytest.mark.cluster
ONE_BY_ONE = {"algorithm": "grid", "concurrent": 1}


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None) -> Recipe:
    return make_recipe(tmp_path, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences, *ON_RAY)


@pytest.fixture
def embedded(recipe: Recipe) -> Recipe:
    """The recipe, whose tables are complete."""
    embed_tables(recipe)
    return recipe


def test_a_grid_embeds_once_and_trains_the_best_trial_again(
    recipe: Recipe, tmp_path: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials without a GPU see none: by default, Ray would let them see all GPUs of their node."""
    seen = tmp_path / "seen"
    seen.mkdir()

    def note_gpus(context: TrialContext, name: str, *more: Any) -> None:
        (seen / name).write_text(repr(os.environ.get("CUDA_VISIBLE_DEVICES")))
        run_trial(context, name, *more)

    monkeypatch.setattr("distcse.cluster.tune.run_trial", note_gpus)
    of_evaluation = (f"evaluation.data={labelled}", "evaluation.dev=agreement", "evaluation.final_suites=[sts]")
    recipe = load_recipe(str(tmp_path / "recipe.yaml"), [*ON_RAY, *of_evaluation, "corpus.split=test"])
    parameters = {
        TAU2: {"values": [0.05, 0.1]},
        "objective.rank.tau3": {"expression": "tau2 / 2"},
        LR: {"values": [1e-3]},
    }
    search, final = {"algorithm": "grid", "concurrent": 2}, {"seeds": [1]}
    sweep = make_sweep(tmp_path, parameters, search=search, final_runs=final, loggers=["tensorboard"])
    events: list[Event] = []
    result = run_new_sweep(recipe, sweep, Reporter(events.append))
    stages = [event for event in events if isinstance(event, StageProgress) and event.finished]
    rows = next(stage.done for stage in stages if stage.name == "corpus")
    assert rows_embedded(events) == [rows, rows]  # two teachers, each row once, for four training runs
    assert [trial.status for trial in result.trials] == ["finished"] * 2
    assert {file.read_text() for file in seen.iterdir()} == {"''"}
    assert {(t.values[TAU2], t.values["objective.rank.tau3"]) for t in result.trials} == {(0.05, 0.025), (0.1, 0.05)}
    warned = [event.text for event in events if isinstance(event, LogMessage) and "[DCSE-W" in event.text]
    assert len([line for line in warned if "corpus.split" in line]) == 1 and len(warned) == len({*warned})
    assert not [file for file in result.directory.rglob("events.jsonl") if "[DCSE-W" in file.read_text()]

    best_trial, best = result.best_trial, load_recipe(str(result.best_recipe))
    assert best_trial is not None and best_trial.best is not None
    assert best_trial.best.score == max(entry.score for trial in result.trials for entry in trial.metrics)
    assert best.objective.rank is not None and best.objective.rank.tau2 == best_trial.values[TAU2]
    assert best.training.lr == best_trial.values[LR] and best.evaluation.final_suites == ["sts"]
    assert pyarrow.parquet.read_table(result.directory / "trials.parquet").num_rows == 2
    assert sorted(len(trial.values) for trial in result.final_results) == [
        1,
        4,
    ]  # the original recipe and the best trial
    for trial in result.final_results:
        assert Encoder.load(result.directory / "final_runs" / trial.name / "model").encode(["A cat."]).shape == (1, 32)
    assert result.evaluation is not None
    assert [about.name for about in result.evaluation.models] == ["recipe, seed 1", "best, seed 1"]
    for trial in result.trials:
        logged = scalars(result.directory / "trials" / trial.name / "tensorboard")
        assert logged["dev"] == [(metric.step, pytest.approx(metric.score, rel=1e-6)) for metric in trial.metrics]
    assert len(list((result.directory / "final_runs").rglob("tensorboard/events.out.tfevents*"))) == 2
    assert not list((result.directory / "trials").rglob("checkpoints"))
    page, text = (file.read_text() for file in write_sweep_pages(result))
    titles = ("Best trial", "Final runs", "Temperatures", "Learning curves")
    assert [title for title in titles if title not in page] == []
    assert "| recipe | best |" in text and "2 finished" in text
    assert "with 1 seed. Test scores did not" in text and "±" not in text
    for trial in result.trials:  # under the names that the terminal shows
        assert f"| {trial.name} |" in text and trial.name in page


@pytest.mark.slow
@pytest.mark.oldest_ray
def test_tpe_with_a_trainer_of_two_workers_in_its_trial(embedded: Recipe, tmp_path: Path, labelled: Path) -> None:
    two = with_values(embedded, {"training.workers": 2, "training.max_steps": 12, "evaluation.data": str(labelled)})
    parameters = {TAU2: {"log_uniform": [0.02, 0.2]}, "teachers.encoders.*.alpha": {"simplex": True}}
    sweep = make_sweep(tmp_path, parameters, search={"trials": 1, "concurrent": 1})
    (trial,) = run_new_sweep(two, sweep).trials
    assert trial.status == "finished" and trial.metrics[-1].progress == 100
    weights = [trial.values[f"teachers.encoders.{n}.alpha"] for n in range(2)]
    assert sum(weights) == pytest.approx(1) and 0.02 <= trial.values[TAU2] <= 0.2


@pytest.mark.slow
@pytest.mark.oldest_ray
def test_pbt_trials_continue_from_better_ones(embedded: Recipe, tmp_path: Path) -> None:
    parameters = {LR: {"log_uniform": [1e-6, 1e-3]}, TAU2: {"values": [0.05, 0.1]}}
    search, schedule = {"algorithm": "random", "trials": 4, "concurrent": 2}, {"kind": "pbt", "grace_period": 0.25}
    sweep = make_sweep(tmp_path, parameters, search=search, schedule=schedule)
    drawn: dict[str, set[float]] = {}

    def note(event: Event) -> None:
        if isinstance(event, TrialUpdate):
            drawn.setdefault(event.trial, set()).add(event.values[LR])

    result = run_new_sweep(with_values(embedded, {"training.epochs": 2}), sweep, Reporter(note))
    assert [trial.status for trial in result.trials] == ["finished"] * 4
    assert all(1e-6 <= rate <= 1e-3 for rates in drawn.values() for rate in rates)
    assert max(map(len, drawn.values())) > 1  # a trial continued from another's checkpoint with other values
    assert all(trial.metrics[-1].progress == 100 for trial in result.trials)
    assert {trial.values[TAU2] for trial in result.trials} <= {0.05, 0.1}
    page, _ = write_sweep_pages(result)
    assert "tau2" in page.read_text()


@pytest.mark.slow
def test_a_sweep_of_a_mutual_distillation(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None
) -> None:
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    recipe = make_mutual_recipe(tmp_path, models, sentences, "evaluation.final_suites=[]")
    parameters = {"bi.lr": {"values": [1e-3]}, "mutual.cycles": {"values": [1, 2]}}
    result = run_new_sweep(recipe, make_sweep(tmp_path, parameters, search={"algorithm": "grid", "concurrent": 2}))
    assert [trial.status for trial in result.trials] == ["finished"] * 2
    assert {entry.metrics["best"] for entry in result.result_grid} == {trial.best.score for trial in result.trials}
    assert {(len(t.metrics), t.values["mutual.cycles"]) for t in result.trials} == {(1, 1), (2, 2)}
    assert all(trial.metrics[-1].progress == 100 for trial in result.trials)


def test_sweeps_that_cannot_run_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, {TAU2: {"uniform": [0.05, 0.1]}}, search={"concurrent": 99})
    with fails_with(ClusterTooSmallError, "99 training workers of 1 CPU each", "search.concurrent"):
        run_new_sweep(recipe, sweep)
    two = with_values(recipe, {"training.workers": 2, "training.cpus_per_worker": None})
    one_trial = make_sweep(tmp_path, {TAU2: {"uniform": [0.05, 0.1]}}, search={"concurrent": 1})
    resources = trial_resources(two, one_trial, alive())
    assert resources.reserved["CPU"] + 2 * resources.cpus <= 6  # else its workers would never start


@pytest.mark.slow
def test_trials_that_are_killed_diverge_or_are_stopped(embedded: Recipe, tmp_path: Path) -> None:
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
    schedule = {"kind": "asha", "grace_period": 0.5, "reduction_factor": 1.5}
    sweep = make_sweep(tmp_path, parameters, search=ONE_BY_ONE, schedule=schedule)
    longer = with_values(embedded, {"training.epochs": 2})
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


@pytest.mark.slow
def test_a_stop_in_the_final_evaluation_keeps_what_is_measured(
    embedded: Recipe, tmp_path: Path, labelled: Path
) -> None:
    values = {"evaluation.data": str(labelled), "evaluation.dev": "agreement", "evaluation.final_suites": ["sts"]}
    recipe = with_values(embedded, values)
    sweep = make_sweep(tmp_path, {LR: {"values": [1e-3]}}, search=ONE_BY_ONE, final_runs={"seeds": [1, 2]})
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
    rows = {(row.suite, *sorted(row.spreads)) for row in rows_of(stopped)}
    assert rows >= {("dev", "best", "recipe"), ("sts", "recipe")}
    assert "evaluation of best, seed 1: stopped" in pages[1].read_text()
    (line,) = (event.text for event in events if isinstance(event, LogMessage) and "stopped before" in event.text)
    assert "evaluation of best, seed 1, evaluation of best, seed 2; continue with --resume" in line
    events.clear()
    done = run_sweep(recipe, sweep, directory, Reporter(events.append))
    assert not done.interrupted and measured() == names[2:]
    assert done.evaluation is not None and [model.name for model in done.evaluation.models] == names


@pytest.mark.slow
def test_a_search_ends_when_its_hours_are_over(embedded: Recipe, tmp_path: Path) -> None:
    parameters = {LR: {"log_uniform": [1e-5, 1e-3]}}
    search = {"algorithm": "random", "trials": 200, "hours": 25 / 3600, "concurrent": 1}
    sweep = make_sweep(tmp_path, parameters, search=search)
    result = run_new_sweep(with_values(embedded, {"training.epochs": 4}), sweep)
    assert 0 < len(result.trials) < 200 and not result.interrupted
    assert {trial.status for trial in result.trials} <= {"finished", "stopped"} and result.best_trial is not None


@pytest.mark.slow
def test_a_damaged_state_of_ray_tune_is_not_restored(embedded: Recipe, tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, {LR: {"values": [1e-3, 1e-4]}}, search=ONE_BY_ONE)
    directory = begin(embedded, sweep)
    first = run_sweep(embedded, sweep, directory, Reporter())
    (state,) = (directory / "ray_tune" / "search").glob("experiment_state-*.json")
    state.write_text(state.read_text()[:100])
    again = run_sweep(embedded, sweep, directory, Reporter())
    assert [trial.reused_from for trial in again.trials[2:]] == [trial.name for trial in first.trials]
    assert again.best_trial == first.best_trial
    (tmp_path / "corpus.txt").write_text("\n".join(f"Other text, row {row}." for row in range(300)))
    with fails_with(ResumeMismatchError, "corpus", str(directory)):
        run_sweep(embedded, sweep, directory, Reporter())


@pytest.mark.slow
def test_a_resumed_sweep_does_not_repeat_ended_trials_of_a_killed_driver(
    embedded: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = tmp_path / "space.yaml"
    rates = [1e-3, 3e-4, 1e-5]
    make_sweep(tmp_path, {LR: {"values": rates}}, search=ONE_BY_ONE)
    undisturbed = {}
    for rate in rates:
        alone = with_values(embedded, {"training.workers": 0, LR: rate})
        best = run(alone, Reporter()).train_result.state.best
        assert best is not None
        undisturbed[rate] = best[1]

    runs = tmp_path / "elsewhere"
    arguments = [str(tmp_path / "recipe.yaml"), "--space", str(space), *ON_RAY, f"storage.runs={runs}"]
    command, environment = [*TRAIN[:2], "distcse.tune", *arguments], user_environment(PYTHONPATH=str(ROOT))
    with open(tmp_path / "log.txt", "w") as log:
        driver = subprocess.Popen(command, env=environment, stderr=log, stdout=log)
        ended: set[str] = set()
        deadline = time.monotonic() + 240
        while not ended and time.monotonic() < deadline and driver.poll() is None:
            time.sleep(0.1)
            folders = list(runs.glob("*/trials"))
            ended = {t.name for t in read_trials(open_store(folders[0])) if t.ended} if folders else set()
        driver.kill()
        driver.wait()
    assert ended, (tmp_path / "log.txt").read_text()
    (folder,) = runs.iterdir()
    before = {t.name: t for t in read_trials(open_store(folder / "trials"))}
    assert len(before) < 3
    assert cli.main(["tune", "--resume", str(folder)]) == 0
    after = {t.name: t for t in read_trials(open_store(folder / "trials"))}
    assert len(after) == 3 and all(trial.status == "finished" for trial in after.values())
    for name in ended:
        assert after[name] == before[name]  # including its seconds
    best_trial = max(after.values(), key=lambda t: t.best.score if t.best else 0)
    assert best_trial.values == {LR: max(undisturbed, key=undisturbed.__getitem__)}
    for trial in after.values():
        assert trial.best is not None
        assert trial.best.score == pytest.approx(undisturbed[trial.values[LR]], abs=0.05)
    assert f"distcse train {folder / 'best.yaml'}" in capsys.readouterr().out
