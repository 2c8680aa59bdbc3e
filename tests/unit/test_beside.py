"""Dev scores beside the training: they come late, and everything else comes to the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from distcse.errors import RecipeError, RunError
from distcse.events import DevScore, Event, LogMessage, Reporter
from distcse.experiments.distillation.batch_loader import BatchLoader, TrainSpec
from distcse.experiments.distillation.remote_evaluator import evaluator_requests
from distcse.experiments.distillation.task import DistillationTask, fit
from distcse.planning.lengths import assumed_lengths
from distcse.planning.machines import GPUS
from distcse.planning.student import StudentRun
from distcse.recipe import Recipe
from distcse.teachers.ensemble import LocalTeacherClient
from distcse.teachers.serving import serving
from distcse.teachers.table import EmbeddingTable
from distcse.trainer.checkpoints import CheckpointStore, ModelState, load_trainer_state
from distcse.trainer.trainer import TrainResult
from distcse.tuning.trial_resources import TrialResources, trial_recipe
from tests.jobs import make_spec, train
from tests.weights import assert_equal_weights, weights_of

MakeRecipe = Callable[..., Recipe]


class Later:
    """Scores with a student of its own when it is asked for the score; says to be ready, or not, as it is told."""

    def __init__(self, spec: TrainSpec, tables: list[EmbeddingTable], ready: bool) -> None:
        self._task = DistillationTask(spec, BatchLoader(spec, 0, 1), sources_of(spec, tables))
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


class Refusing(Later):
    """One that has no score."""

    def take(self) -> float:
        raise RunError("the dev score failed: no reason")


def sources_of(spec: TrainSpec, tables: list[EmbeddingTable]) -> list[LocalTeacherClient]:
    teachers = zip(spec.recipe.teachers.encoders, tables, strict=True)
    return [LocalTeacherClient(serving(teacher, table)) for teacher, table in teachers]


def train_beside(
    spec: TrainSpec,
    tables: list[EmbeddingTable],
    scorer: Later,
    events: list[Event],
    stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    return fit(spec, sources_of(spec, tables), Reporter(events.append, stop), scorer=scorer)


@pytest.mark.parametrize("ready", [True, False])
def test_scores_beside_the_training_are_those_made_in_it(ready: bool, recipe_with: MakeRecipe) -> None:
    recipe = recipe_with("training.lr=3e-2")  # so high that the best is not the last
    here, tables = make_spec(recipe)
    told: list[Event] = []
    outcome = train(here, tables, told)
    beside, tables = make_spec(recipe)
    heard: list[Event] = []
    later = train_beside(beside, tables, scorer := Later(beside, tables, ready), heard)
    assert later.state == outcome.state and scorer.begun == len(outcome.state.scores) == 5
    one, other = ([replace(e, is_kept=0.0) for e in events if isinstance(e, DevScore)] for events in (told, heard))
    assert one == other
    assert_equal_weights(weights_of(here.run), weights_of(beside.run))
    best, also = CheckpointStore(here.run).best(), CheckpointStore(beside.run).best()
    assert best is not None and also is not None and best.name == also.name
    assert best != CheckpointStore(here.run).latest()


def test_a_checkpoint_has_all_scores_but_its_own_and_a_run_that_goes_on_has_it_made(recipe_with: MakeRecipe) -> None:
    recipe = recipe_with("training.log_every=6")
    undisturbed, tables = make_spec(recipe)
    train(undisturbed, tables)
    spec, tables = make_spec(recipe)
    scorer, events = Later(spec, tables, ready=False), []  # type: ignore[var-annotated]
    first = train_beside(spec, tables, scorer, events, stop=lambda: scorer.begun == 2)
    latest = CheckpointStore(spec.run).latest()
    assert first.interrupted and latest is not None
    assert [step for step, _ in load_trainer_state(latest).scores] == [0, 6] and latest.name == "step-000012"
    again = Later(spec, tables, ready=False)
    last = train_beside(spec, tables, again, [])
    assert [step for step, _ in last.state.scores] == [0, 6, 12, 18, 22] and again.begun == 3
    assert_equal_weights(weights_of(undisturbed.run), weights_of(spec.run))


def test_early_stopping_is_one_score_later(recipe_with: MakeRecipe) -> None:
    recipe = recipe_with("training.lr=3e-2", "evaluation.patience=1", "evaluation.eval_steps=2", "training.log_every=2")
    here, tables = make_spec(recipe)
    outcome = train(here, tables)
    beside, tables = make_spec(recipe)
    events: list[Event] = []
    later = train_beside(beside, tables, Later(beside, tables, ready=False), events)
    assert outcome.state.finished and later.state.finished
    assert later.state.step == outcome.state.step + 2 < later.steps
    assert later.state.scores[:-1] == outcome.state.scores
    assert any("stopped early" in event.text for event in events if isinstance(event, LogMessage))


def test_a_score_that_fails_ends_the_run_and_leaves_its_checkpoints(recipe_with: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_with())
    with pytest.raises(RunError, match="no reason"):
        train_beside(spec, tables, Refusing(spec, tables, ready=False), [])
    latest = CheckpointStore(spec.run).latest()
    assert latest is not None and latest.name == "step-000000"


def test_nothing_to_score_asks_nobody(recipe_with: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_with("evaluation.dev=none"))
    scorer = Later(spec, tables, ready=True)
    assert train_beside(spec, tables, scorer, []).state.scores == [] and scorer.begun == 0


def test_it_wants_a_worker_and_takes_room(recipe_with: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match=r"evaluation\.beside starts a process"):
        recipe_with("evaluation.async_eval={}")
    recipe = recipe_with("evaluation.async_eval={gpus: 0.5}", "training.workers=1")
    (demand,) = evaluator_requests(recipe)
    assert demand.each == {"CPU": 1.0, "GPU": 0.5} and evaluator_requests(recipe_with()) == []
    assert demand.ways_out(["GPU"]).startswith("training.workers or evaluation.async_eval.gpus")
    trial = trial_recipe(recipe, TrialResources(2, 1.0, 0.0, 1))
    assert isinstance(trial, Recipe) and trial.evaluation.async_eval is None and trial.evaluation.final_suites == []


def test_a_plan_counts_the_waits_that_are_left(recipe_with: MakeRecipe) -> None:
    assumed, machine = assumed_lengths(400, "a test says so"), GPUS["A100-40G"]
    here = StudentRun.of(recipe_with("training.workers=1"), assumed)
    beside = StudentRun.of(recipe_with("training.workers=1", "evaluation.async_eval={}"), assumed)
    whole, left = here.dev_seconds(machine, 0.0), beside.dev_seconds(machine, 1e3)
    assert beside.dev_seconds(machine, 0.0) == pytest.approx(whole)  # nothing goes on meanwhile
    score = (whole - left) / (here.dev_scores - 1)
    assert 0 < score < left < whole  # the last one is waited for, and checkpoints are written as ever
