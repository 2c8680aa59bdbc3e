"""Recorded steps: on a CPU, where what is recorded is the call itself, carried out again on the tensors it was recorded with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from distcse.errors import RecipeError, RunError
from distcse.events import Event, LogMessage, StepReport
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory
from distcse.trainer import cuda_graphs as graphs
from distcse.trainer import trainer
from distcse.trainer.cuda_graphs import CudaGraphStep
from tests.jobs import make_spec, train, trained_in_one_go_and_in_two
from tests.weights import assert_equal_weights, weights_of

MakeRecipe = Callable[..., Recipe]
Parts = dict[str, Tensor]
GRAPHS = "training.cuda_graphs=true"


class Again:
    """Records a call as itself, whose answer is put into the tensors of its first one; notes what it was asked."""

    def __init__(self) -> None:
        self.warmed = self.recorded = self.repeated = 0

    @contextmanager
    def warming(self) -> Iterator[None]:
        self.warmed += 1
        yield

    def record(self, call: Callable[[], Parts]) -> Callable[[], Parts]:
        self.recorded += 1
        first: Parts = {}

        def again() -> Parts:
            self.repeated += 1
            for name, part in call().items():
                first.setdefault(name, torch.empty_like(part)).copy_(part)
            return first

        return again


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Again:
    """What records in place of a GPU, where the recipe wants its steps recorded."""
    found = Again()

    monkeypatch.setattr(trainer, "_graph_step", lambda engine, reporter: CudaGraphStep(trainer.training_step, found))
    return found


@pytest.mark.parametrize("most", [8, 2])
@pytest.mark.parametrize(
    "knobs",
    [
        (),
        ("student.dropout=0.0", "training.precision=bf16"),
        ("objective.rank.form=list_mle", "teachers.rank_noise_group=3", "teachers.disagreement_scale=0.5"),
        ("objective.rank=null", "objective.regression={}", "student.projection=none"),
        ("objective.rank=null", "objective.rank_regression={}", "objective.combine=hinge"),
    ],
    ids=lambda overrides: " ".join(overrides) or "RankCSE",
)
def test_recorded_steps_learn_what_plain_ones_do(
    overrides: tuple[str, ...], most: int, recipe_with: MakeRecipe, recorder: Again, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of several shapes, dropout, a rate that changes, scores and checkpoints between: the same bits.

    The kernel takes a rate that is a tensor in float32, so rates are such as that has all bits of.
    """
    monkeypatch.setattr(graphs, "MOST", most)
    monkeypatch.setattr(trainer, "warmup_then_linear", lambda step, *_: 1 - step % 8 / 8)
    runs, told = [], []
    for more in ((), (GRAPHS,)):
        events: list[Event] = []
        spec, tables = make_spec(recipe_with("training.epochs=3", f"training.lr={2**-10}", *overrides, *more))
        outcome = train(spec, tables, events)
        runs.append(weights_of(spec.run))
        told.append([event.losses for event in events if isinstance(event, StepReport)])
    assert_equal_weights(*runs)
    assert told[0] == told[1] and len({losses["loss"] for losses in told[0]}) > 2
    assert 0 < recorder.recorded <= min(most, recorder.warmed)
    assert recorder.warmed + recorder.repeated == outcome.steps
    assert recorder.repeated > outcome.steps / 2 or most == 2


def test_a_run_that_goes_on_takes_steps_call_by_call_that_were_recorded_before(
    recipe_with: MakeRecipe, recorder: Again
) -> None:
    """The same bits, at rates that float32 does not have all bits of."""
    undisturbed, resumed = trained_in_one_go_and_in_two(recipe_with(GRAPHS, "training.epochs=2"))
    assert recorder.repeated > 10
    assert_equal_weights(weights_of(undisturbed.run), weights_of(resumed.run))


def test_a_step_that_cannot_be_recorded_says_so(
    recipe_with: MakeRecipe, recorder: Again, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(call: Callable[[], Parts]) -> Callable[[], Parts]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr(recorder, "record", refuse)
    spec, tables = make_spec(recipe_with(GRAPHS))
    with pytest.raises(RunError, match=r"stream is capturing\); go on with --resume and training\.cuda_graphs=false"):
        train(spec, tables)
    _, recipe = RunDirectory.reopen(spec.run, ["training.cuda_graphs=false"])
    assert isinstance(recipe, Recipe)
    assert train(replace(spec, recipe=recipe), tables).state.finished


def test_the_reason_is_what_is_told() -> None:
    """A recording that failed ends with an error of its own."""

    @contextmanager
    def recording() -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), graphs.first_error(recording()):
        raise RuntimeError("operation not permitted when stream is capturing")


def test_attention_that_asks_what_is_padded_is_refused(
    recipe_with: MakeRecipe, recorder: Again, tiny: Callable[..., Any]
) -> None:
    spec, tables = make_spec(recipe_with(GRAPHS, f"student.backbone={tiny('modernbert')}"))
    with pytest.raises(RunError, match=r"asks in its steps what of a batch is padding.*training\.cuda_graphs=false"):
        train(spec, tables)


def test_what_a_graph_reads_and_writes_stays_where_it_is(recipe_with: MakeRecipe, recorder: Again) -> None:
    """A score of a student mixed with its start and a checkpoint put numbers into tensors, not other tensors."""
    places: list[set[int]] = []
    made = trainer.make_engine

    def noted(*told: Any) -> Any:
        engine = made(*told)
        move = engine.step

        def step(lr: Any) -> None:
            move(lr)
            tensors = [*engine._model.state_dict().values(), engine._optimizer._updates]
            tensors += [moment for kinds in engine._optimizer.moments.values() for moment in kinds.values()]
            places.append({tensor.data_ptr() for tensor in tensors})
            assert all(parameter.grad is None for parameter in engine._parameters.values())

        engine.step = step
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "make_engine", noted)
        overrides = ("training.epochs=2", "student.init_weight_mix=0.2", "student.projection=batch_norm_mlp")
        spec, tables = make_spec(recipe_with(GRAPHS, *overrides))
        outcome = train(spec, tables)
    assert len(places) == outcome.steps and len(outcome.state.scores) > 2
    assert all(place == places[0] for place in places)


def test_a_machine_without_a_gpu_says_that_it_takes_steps_call_by_call(recipe_with: MakeRecipe) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    spec, tables = make_spec(recipe_with(GRAPHS, "training.max_steps=2"))
    events: list[Event] = []
    assert train(spec, tables, events).state.finished
    (told,) = [event.text for event in events if isinstance(event, LogMessage) and "cuda_graphs" in event.text]
    assert told == "training.cuda_graphs: there is no GPU here, so steps are taken call by call"


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        (("training.engine=auto",), "engine: torch"),
        (("training.workers=2",), "workers: 1"),
        (("training.gradient_accumulation=2",), "gradient_accumulation: 1"),
        (("training.grad_cache_chunk=4",), "chunk: null"),
        (("training.dropout_rng_streams=4",), "dropout_streams: null"),
        (("objective.detection={operation: deletion}",), r"objective\.detection: null"),
        (("objective.rank.queue={num_batches: 2}", "student.projection=none"), r"objective\.rank\.memory: null"),
        (("objective.custom={mine: {class_path: 'a.py:Mine'}}",), r"objective\.own: {}"),
        (("student.trust_remote_code=true",), r"student\.trust_remote_code: false"),
    ],
)
def test_what_cannot_be_recorded_is_refused(overrides: tuple[str, ...], told: str, recipe_with: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match=rf"write {told}, or (training\.)?cuda_graphs: false"):
        recipe_with(GRAPHS, *overrides)
