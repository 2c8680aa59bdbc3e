"""Sweeps on a Ray cluster: one embedding pass for all trials, the best trial trained again, TPE and PBT."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from distcse.cluster.nodes import alive
from distcse.cluster.tune import search
from distcse.errors import ClusterTooSmallError, RunDirectoryError, SearchSpaceError
from distcse.events import Event, LogMessage, Reporter, StageProgress, TrialUpdate
from distcse.models import Encoder
from distcse.recipe import Recipe, load_recipe, read_recipe
from distcse.report.sweep_page import write_sweep_pages
from distcse.storage import open_store
from distcse.tuning.space import Space
from distcse.tuning.sweep import reopen
from distcse.tuning.trial import TrialContext
from distcse.tuning.trial_resources import trial_resources
from tests.failures import fails_with
from tests.jobs import embed_tables, make_recipe, rows_embedded
from tests.pairs import make_mutual_recipe
from tests.sweeps import LR, ON_RAY, TAU2, make_sweep, run_new_sweep
from tests.tensorboard import scalars

pytestmark = pytest.mark.cluster


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None) -> Recipe:
    return make_recipe(tmp_path, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences, *ON_RAY)


def test_a_grid_embeds_once_and_trains_the_best_trial_again(recipe: Recipe, tmp_path: Path, labelled: Path) -> None:
    recipe = read_recipe(
        str(tmp_path / "recipe.yaml"),
        [
            *ON_RAY,
            f"evaluation.data={labelled}",
            "evaluation.dev=agreement",
            "evaluation.final_suites=[sts]",
            "corpus.split=test",
        ],
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
    assert rows_embedded(events) == [rows, rows]  # two teachers, each row once, for six training runs
    assert [trial.status for trial in result.trials] == ["finished"] * 4
    assert {(t.values[TAU2], t.values["objective.rank.tau3"]) for t in result.trials} == {(0.05, 0.025), (0.1, 0.05)}
    warned = [event.text for event in events if isinstance(event, LogMessage) and "[DCSE-W" in event.text]
    assert len([line for line in warned if "corpus.split" in line]) == 1 and len(warned) == len({*warned})
    assert not [file for file in result.directory.rglob("events.jsonl") if "[DCSE-W" in file.read_text()]
    best_trial = result.best_trial
    assert best_trial is not None and best_trial.best is not None
    assert best_trial.best.score == max(entry.score for trial in result.trials for entry in trial.metrics)

    best = load_recipe(str(result.best_recipe))
    assert best.objective.rank is not None and best.objective.rank.tau2 == best_trial.values[TAU2]
    assert best.training.lr == best_trial.values[LR] and best.evaluation.final_suites == ["sts"]
    assert pyarrow.parquet.read_table(result.directory / "trials.parquet").num_rows == 4
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
    assert "with 1 seed. Test scores did not" in text and "±" not in text
    for trial in result.trials:  # under the names that the terminal shows
        assert f"| {trial.name} |" in text and trial.name in page

    later: list[Event] = []
    again = make_sweep(tmp_path, {TAU2: {"values": [0.05, 0.05, 0.2]}}, search={"algorithm": "grid", "concurrent": 1})
    second = run_new_sweep(recipe, again, Reporter(later.append))
    assert rows_embedded(later) == [0, 0]
    assert [bool(trial.reused_from) for trial in second.trials] == [False, True, False]
    assert second.trials[1].metrics == second.trials[0].metrics


@pytest.mark.slow
@pytest.mark.oldest_ray
def test_tpe_with_a_trainer_of_two_workers_in_its_trial(recipe: Recipe, tmp_path: Path, labelled: Path) -> None:
    embed_tables(recipe)
    training = recipe.training.model_copy(update={"workers": 2, "max_steps": 12})
    evaluation = recipe.evaluation.model_copy(update={"data": str(labelled)})
    two = recipe.model_copy(update={"training": training, "evaluation": evaluation})
    parameters = {TAU2: {"log_uniform": [0.02, 0.2]}, "teachers.encoders.*.alpha": {"simplex": True}}
    sweep = make_sweep(tmp_path, parameters, search={"trials": 1, "concurrent": 1})
    (trial,) = run_new_sweep(two, sweep).trials
    assert trial.status == "finished" and trial.metrics[-1].progress == 100
    weights = [trial.values[f"teachers.encoders.{n}.alpha"] for n in range(2)]
    assert sum(weights) == pytest.approx(1) and 0.02 <= trial.values[TAU2] <= 0.2


@pytest.mark.slow
@pytest.mark.oldest_ray
def test_pbt_trials_continue_from_better_ones(recipe: Recipe, tmp_path: Path) -> None:
    embed_tables(recipe)
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
    assert all(trial.metrics[-1].progress == 100 for trial in result.trials)
    assert {trial.values[TAU2] for trial in result.trials} <= {0.05, 0.1}
    page, _ = write_sweep_pages(result)
    assert "tau2" in page.read_text()


def test_a_trial_without_a_gpu_sees_none(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, Ray lets an actor without a GPU see all GPUs of its node."""

    def look(
        context: TrialContext,
        name: str,
        values: dict[str, Any],
        report: Callable[..., None],
        donor: Path | None,
        stop_requested: Callable[[], bool],
    ) -> None:
        (context.trials.path / name).mkdir(parents=True)
        (context.trials.path / name / "seen").write_text(repr(os.environ.get("CUDA_VISIBLE_DEVICES")))

    monkeypatch.setattr("distcse.cluster.tune.run_trial", look)
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.gpus_per_worker=0")
    sweep = make_sweep(tmp_path, {LR: {"values": [1e-3]}}, search={"algorithm": "grid", "concurrent": 1})
    context, resources = (
        TrialContext(recipe, open_store(tmp_path / "trials")),
        trial_resources(recipe, sweep, alive()),
    )
    search(context, Space(sweep, recipe), sweep, tmp_path / "search", resources, Reporter())
    (seen,) = (tmp_path / "trials").glob("*/seen")
    assert seen.read_text() == "''"


@pytest.mark.slow
def test_a_sweep_of_a_mutual_distillation(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None
) -> None:
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    recipe = make_mutual_recipe(tmp_path, models, sentences, "evaluation.final_suites=[]")
    sweep = make_sweep(
        tmp_path,
        {"bi.lr": {"values": [1e-3]}, "mutual.cycles": {"values": [1, 2]}},
        search={"algorithm": "grid", "concurrent": 2},
    )
    result = run_new_sweep(recipe, sweep)
    assert [trial.status for trial in result.trials] == ["finished"] * 2
    assert {entry.metrics["best"] for entry in result.result_grid} == {trial.best.score for trial in result.trials}
    assert {(len(t.metrics), t.values["mutual.cycles"]) for t in result.trials} == {(1, 1), (2, 2)}
    assert all(trial.metrics[-1].progress == 100 for trial in result.trials)


def test_sweeps_that_cannot_run_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, {TAU2: {"uniform": [0.05, 0.1]}}, search={"concurrent": 99})
    with fails_with(ClusterTooSmallError, "99 training workers of 1 CPU each", "search.concurrent"):
        run_new_sweep(recipe, sweep)
    two = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"workers": 2, "cpus_per_worker": None})}
    )
    one_trial = make_sweep(tmp_path, {TAU2: {"uniform": [0.05, 0.1]}}, search={"concurrent": 1})
    resources = trial_resources(two, one_trial, alive())
    assert resources.reserved["CPU"] + 2 * resources.cpus <= 6  # else its workers would never start
    with fails_with(SearchSpaceError, "parameters.teachers.encoders.0.alpha", "evaluation.dev=agreement"):
        run_new_sweep(recipe, make_sweep(tmp_path, {"teachers.encoders.*.alpha": {"simplex": True}}))
    with fails_with(RunDirectoryError, str(tmp_path / "nowhere"), "--resume"):
        reopen(tmp_path / "nowhere")
