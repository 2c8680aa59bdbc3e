"""Asynchronous dev scores: they arrive later, and everything else equals synchronous evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from distcse.devices.resources import Node
from distcse.errors import InvalidValueError, StoppedEarlyError, WorkFailedError
from distcse.events import DevScore, Event, LogMessage, Reporter, StepReport
from distcse.recipe import Recipe
from distcse.runs.distillation.batch_loader import BatchLoader, TrainSpec
from distcse.runs.distillation.distillation_task import DistillationTask, train_student
from distcse.runs.distillation.experiment import Distillation
from distcse.runs.distillation.processes import plan_run
from distcse.teachers.lists import LocalTeacherClient
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import open_table_teacher
from distcse.training.checkpoint_files import ModelState, load_trainer_state
from distcse.training.checkpoints import CheckpointStore
from distcse.training.trainer import TrainResult
from tests.failures import fails_with
from tests.jobs import make_recipe, make_spec, train
from tests.weights import Weights, assert_equal_weights, weights_of

MakeRecipe = Callable[..., Recipe]


class LocalEvaluator:
    """`AsyncEvaluator` with a separate student in this process; it scores in `take`, and `is_ready` returns `ready`."""

    def __init__(self, spec: TrainSpec, tables: list[EmbeddingTable], ready: bool) -> None:
        self._task = DistillationTask(spec, BatchLoader(spec, 0, 1), clients_of(spec, tables))
        self._task.model.eval()
        self._ready = ready
        self.begun = 0

    def begin(self, state: ModelState) -> None:
        self._task.model.load_state_dict({name: weight.clone() for name, weight in state.weights.items()})
        self.begun += 1

    def is_ready(self) -> bool:
        return self._ready

    def take(self) -> float:
        return self._task.evaluate()


class WaitingEvaluator(LocalEvaluator):
    """An evaluator without a node, from the score number `waits_from` on, until a stop is requested."""

    waits_from = 0

    def take(self) -> float:
        if self.begun < self.waits_from:
            return super().take()
        raise StoppedEarlyError("stopped while the evaluator waited for a node")


class FailingEvaluator(LocalEvaluator):
    """An evaluator whose `take` raises an error."""

    def take(self) -> float:
        raise WorkFailedError("the dev score failed: no reason")


def clients_of(spec: TrainSpec, tables: list[EmbeddingTable]) -> list[LocalTeacherClient]:
    teachers = zip(spec.recipe.teachers.encoders, tables, strict=True)
    return [LocalTeacherClient(open_table_teacher(teacher, table)) for teacher, table in teachers]


def train_async(
    spec: TrainSpec,
    tables: list[EmbeddingTable],
    evaluator: LocalEvaluator,
    events: list[Event],
    stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    return train_student(spec, clients_of(spec, tables), Reporter(events.append, stop), evaluator=evaluator)


@pytest.fixture(scope="module")
def recipe_with(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]
) -> MakeRecipe:
    """Makes recipes of small jobs, which embed the corpus once."""
    folder, teachers = tmp_path_factory.mktemp("scored"), [tiny("minilm"), tiny("roberta")]
    return lambda *overrides: make_recipe(folder, tiny("bert"), teachers, sentences, *overrides)


@pytest.fixture(scope="module")
def weights(recipe_with: MakeRecipe) -> Weights:
    """The weights of an uninterrupted run with synchronous scores."""
    spec, tables = make_spec(recipe_with())
    train(spec, tables)
    return weights_of(spec.run.path)


@pytest.mark.parametrize("ready", [True, False])
def test_asynchronous_scores_equal_synchronous_ones(ready: bool, recipe_with: MakeRecipe) -> None:
    recipe = recipe_with(
        "training.lr=3e-2", "training.max_steps=13"
    )  # so high that the best checkpoint is not the last
    sync_spec, tables = make_spec(recipe)
    sync_events: list[Event] = []
    expected = train(sync_spec, tables, sync_events)
    async_spec, tables = make_spec(recipe)
    async_events: list[Event] = []
    evaluator = LocalEvaluator(async_spec, tables, ready)
    result = train_async(async_spec, tables, evaluator, async_events)
    assert result.state == expected.state and evaluator.begun == len(expected.state.scores) == 4
    sync_scores, async_scores = (
        [replace(event, blocked_s=0.0) for event in events if isinstance(event, DevScore)]
        for events in (sync_events, async_events)
    )
    assert sync_scores == async_scores
    assert_equal_weights(weights_of(sync_spec.run.path), weights_of(async_spec.run.path))
    sync_best, async_best = CheckpointStore(sync_spec.run.path).best(), CheckpointStore(async_spec.run.path).best()
    assert sync_best is not None and async_best is not None and sync_best.name == async_best.name
    assert sync_best != CheckpointStore(sync_spec.run.path).latest()


@pytest.mark.parametrize(
    ("waits_from", "stop_at", "stored", "scores"),
    [
        (99, 12, [0, 6], [0, 6, 12, 18, 22]),
        (2, 8, [0], [0, 12, 18, 22]),
        (5, 22, [0, 6, 12, 18], [0, 6, 12, 18, 22]),
    ],
    ids=["a checkpoint lacks its own score", "the evaluator waits for a node", "it waits after the last step"],
)
def test_a_stopped_run_resumes_to_the_same_weights_and_scores(
    waits_from: int, stop_at: int, stored: list[int], scores: list[int], recipe_with: MakeRecipe, weights: Weights
) -> None:
    spec, tables = make_spec(recipe_with("training.log_every=2"))
    evaluator, events = WaitingEvaluator(spec, tables, ready=False), list[Event]()
    evaluator.waits_from = waits_from

    def stop() -> bool:
        return any(isinstance(event, StepReport) and event.step == stop_at for event in events)

    first = train_async(spec, tables, evaluator, events, stop)
    latest = CheckpointStore(spec.run.path).latest()
    assert first.interrupted and latest is not None and latest.name == f"step-{stop_at:06}"
    assert [step for step, _ in load_trainer_state(latest).scores] == stored
    second = train_async(spec, tables, LocalEvaluator(spec, tables, ready=False), [])
    assert second.state.finished and [step for step, _ in second.state.scores] == scores
    assert_equal_weights(weights, weights_of(spec.run.path))


def test_early_stopping_is_one_score_later(recipe_with: MakeRecipe) -> None:
    recipe = recipe_with("training.lr=3e-2", "evaluation.patience=1", "evaluation.eval_steps=2", "training.log_every=2")
    sync_spec, tables = make_spec(recipe)
    expected = train(sync_spec, tables)
    async_spec, tables = make_spec(recipe)
    events: list[Event] = []
    result = train_async(async_spec, tables, LocalEvaluator(async_spec, tables, ready=False), events)
    assert expected.state.finished and result.state.finished
    assert result.state.step == expected.state.step + 2 < result.steps
    assert result.state.scores[:-1] == expected.state.scores
    assert any("stopped early" in event.text for event in events if isinstance(event, LogMessage))


def test_a_failed_score_ends_the_run_and_keeps_its_checkpoints(recipe_with: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_with())
    with fails_with(WorkFailedError, "no reason"):
        train_async(spec, tables, FailingEvaluator(spec, tables, ready=False), [])
    latest = CheckpointStore(spec.run.path).latest()
    assert latest is not None and latest.name == "step-000000"


def test_without_dev_scores_the_evaluator_is_not_called(recipe_with: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_with("evaluation.dev=none", "training.max_steps=2"))
    evaluator = LocalEvaluator(spec, tables, ready=True)
    assert train_async(spec, tables, evaluator, []).state.scores == [] and evaluator.begun == 0


def test_it_needs_a_worker_and_requests_resources(recipe_with: MakeRecipe) -> None:
    with fails_with(InvalidValueError, "evaluation.async_eval", "training.workers"):
        recipe_with("evaluation.async_eval={}")
    recipe = recipe_with("evaluation.async_eval={gpus: 0.5}", "training.workers=1")
    nodes = [Node("", {"CPU": 8.0, "GPU": 2.0}, {})]
    request = plan_run(recipe, nodes).evaluator
    assert request is not None and plan_run(recipe_with("training.workers=1"), nodes).evaluator is None
    assert request.each == {"CPU": 1.0, "GPU": 0.5}
    assert request.keys_to_lower(["GPU"]).startswith("training.workers or evaluation.async_eval.gpus")
    trial = Distillation(recipe).trials.recipe(cpus=1.0, gpus=0.0)
    assert isinstance(trial, Recipe)
    assert trial.evaluation.async_eval is None and trial.evaluation.final_suites == []
