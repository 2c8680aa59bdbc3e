"""Recorded steps on a CPU, where the recording is the call itself, repeated on the tensors that it was recorded with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from distcse.errors import CUDAGraphError, InvalidValueError
from distcse.events import Event, Listener, LogMessage, StepReport
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.batch_loader import BatchLoader
from distcse.training import cuda_graphs as graphs
from distcse.training import trainer
from distcse.training.cuda_graphs import CudaGraphStep
from distcse.training.dropout_rng import recorded_rng
from distcse.training.task import StepInputs, TakeStep
from tests.failures import fails_with
from tests.jobs import make_spec, train, train_with_and_without_interruption
from tests.weights import assert_equal_weights, weights_of

MakeRecipe = Callable[..., Recipe]
Parts = dict[str, Tensor]
GRAPHS = "training.cuda_graphs=on"


class CpuRecorder:
    """Replays a call by calling it again and copying the result into the first result's tensors; counts its calls."""

    def __init__(self) -> None:
        self.warmed = self.recorded = self.replayed = 0

    @contextmanager
    def warming(self) -> Iterator[None]:
        self.warmed += 1
        yield

    def record(self, call: Callable[[], Parts], seeds: Sequence[int]) -> Callable[[Sequence[int]], Parts]:
        self.recorded += 1
        result: Parts = {}

        def replay(new_seeds: Sequence[int]) -> Parts:
            self.replayed += 1
            with recorded_rng(ReplacedSeeds(dict(zip(seeds, new_seeds, strict=True))).drawing):
                terms = call()
            for name, part in terms.items():
                result.setdefault(name, torch.empty_like(part)).copy_(part)
            return result

        return replay


class ReplacedSeeds(NamedTuple):
    """Seeds of a replay by those of the recording, in whose place they are set."""

    seeds: dict[int, int]

    @contextmanager
    def drawing(self, seed: int) -> Iterator[None]:
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seeds[seed])
            yield


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CpuRecorder:
    """Replace the recorder of CUDA graphs in training steps."""
    found = CpuRecorder()

    def open_step(
        take_step: TakeStep, device: torch.device, mode: graphs.GraphMode, emit: Listener, key: str
    ) -> TakeStep:
        return take_step if mode == "off" else CudaGraphStep(take_step, found)

    monkeypatch.setattr(trainer, "open_step", open_step)
    return found


@pytest.mark.parametrize("max_graphs", [8, 2])
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        *(
            pytest.param(overrides, marks=pytest.mark.slow)
            for overrides in (
                ("student.dropout=0.0", "training.precision=bf16"),
                ("objective.rank.form=list_mle",),
                ("objective.rank=null", "objective.regression={}", "student.projection=none"),
                ("objective.rank=null", "objective.rank_regression={}", "objective.combine=hinge"),
            )
        ),
    ],
    ids=lambda overrides: " ".join(overrides) or "RankCSE",
)
def test_recorded_steps_give_the_same_weights_as_eager_ones(
    overrides: tuple[str, ...],
    max_graphs: int,
    recipe_with: MakeRecipe,
    recorder: CpuRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bitwise, with several batch shapes, dropout, a changing learning rate, dev scores and checkpoints in between.

    The kernel reads a learning rate tensor in float32, so all rates here are exact in float32.
    """
    monkeypatch.setattr(graphs, "MAX_GRAPHS", max_graphs)
    monkeypatch.setattr(trainer, "warmup_then_linear", lambda step, *_: 1 - step % 8 / 8)
    runs, losses = [], []
    for more in (("training.cuda_graphs=off",), (GRAPHS,)):
        events: list[Event] = []
        spec, tables = make_spec(recipe_with("training.epochs=3", f"training.lr={2**-10}", *overrides, *more))
        result = train(spec, tables, events)
        runs.append(weights_of(spec.run.path))
        losses.append([event.losses for event in events if isinstance(event, StepReport)])
    assert_equal_weights(*runs)
    assert losses[0] == losses[1] and len({terms["loss"] for terms in losses[0]}) > 2
    assert 0 < recorder.recorded <= min(max_graphs, recorder.warmed)
    assert recorder.warmed + recorder.replayed == result.steps
    assert recorder.replayed > result.steps / 2 or max_graphs == 2


@pytest.mark.parametrize(("streams", "recorded"), [(2, 8), (8, 4), (16, 2)])
def test_shapes_of_many_streams_are_recorded_less_often(
    streams: int, recorded: int, recipe_with: MakeRecipe, recorder: CpuRecorder
) -> None:
    """Twelve shapes, each twice: a step is recorded when its shape comes again."""
    spec, _ = make_spec(recipe_with(GRAPHS, f"training.dropout_rng_streams={streams}"))
    batch, engine = BatchLoader(spec, 0, 1).batch(0, torch.device("cpu")), SimpleNamespace(device=torch.device("cpu"))
    step = CudaGraphStep(lambda *_: {"loss": torch.zeros(())}, recorder)
    for number in [*range(12), *range(12)]:
        step(engine, None, StepInputs(batch, torch.zeros(number + 1)), 0.1)  # type: ignore[arg-type]
    assert recorder.recorded == recorded


def test_a_seed_that_a_recording_does_not_know_or_use_is_refused() -> None:
    """With no random states: what is not in the step's inputs would never change in replays."""
    generator: Any = SimpleNamespace(
        clone_state=lambda: generator, graphsafe_get_state=lambda: generator, graphsafe_set_state=id
    )
    rng = graphs.GraphRNG(SimpleNamespace(default_generators=[generator], current_device=lambda: 0), [3, 5])
    rng.register(SimpleNamespace(register_generator_state=id))
    rng.require_all()
    with rng.drawing(3), pytest.raises(RuntimeError, match="not in the step's inputs"), rng.drawing(4):
        pass
    with pytest.raises(RuntimeError, match="not all integers of the step's inputs are seeds"):
        rng.require_all()
    with (
        rng.drawing(5),
        rng.drawing(5),
        rng.drawing(5),
        pytest.raises(RuntimeError, match="drawn from more than 3 times"),
        rng.drawing(5),
    ):
        pass
    rng.require_all()


def test_a_resumed_run_takes_eager_steps_that_were_replayed_before(
    recipe_with: MakeRecipe, recorder: CpuRecorder
) -> None:
    """Weights are bitwise equal, also with learning rates that are not exact in float32."""
    undisturbed, resumed = train_with_and_without_interruption(recipe_with(GRAPHS, "training.epochs=2"))
    assert recorder.replayed > 10
    assert_equal_weights(weights_of(undisturbed.run.path), weights_of(resumed.run.path))


def test_a_step_that_cannot_be_recorded_is_an_error(
    recipe_with: MakeRecipe, recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(call: Callable[[], Parts], seeds: Sequence[int]) -> Callable[[Sequence[int]], Parts]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr(recorder, "record", refuse)
    spec, tables = make_spec(recipe_with(GRAPHS))
    with fails_with(CUDAGraphError, "(operation not permitted when stream is capturing)", "training.cuda_graphs=off"):
        train(spec, tables)
    _, recipe = RunDirectory.reopen(spec.run.path, ["training.cuda_graphs=off"])
    assert isinstance(recipe, Recipe)
    assert train(replace(spec, recipe=recipe), tables).state.finished


def test_the_first_error_of_a_recording_is_raised() -> None:
    """Leaving a failed recording raises a second error."""

    @contextmanager
    def recording() -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), graphs.first_error(recording()):
        raise RuntimeError("operation not permitted when stream is capturing")


def test_attention_that_computes_the_padding_in_a_step_is_refused(
    recipe_with: MakeRecipe, recorder: CpuRecorder, tiny: Callable[..., Any]
) -> None:
    spec, tables = make_spec(recipe_with(GRAPHS, f"student.backbone={tiny('modernbert')}"))
    with fails_with(CUDAGraphError, spec.recipe.student.backbone, "training.cuda_graphs=off"):
        train(spec, tables)


def test_a_graphs_tensors_keep_their_addresses(recipe_with: MakeRecipe, recorder: CpuRecorder) -> None:
    """Scoring interpolated weights and saving a checkpoint write into tensors and do not replace them."""
    addresses: list[set[int]] = []
    make_engine = trainer.make_engine  # type: ignore[attr-defined]

    def make_recording_engine(*arguments: Any) -> Any:
        engine: Any = make_engine(*arguments)
        update = engine.step

        def step(lr: Any) -> None:
            update(lr)
            tensors = [*engine.model.state_dict().values(), engine.optimizer.updates]
            tensors += [moment for kinds in engine.optimizer.moments.values() for moment in kinds.values()]
            addresses.append({tensor.data_ptr() for tensor in tensors})
            assert all(parameter.grad is None for parameter in engine.parameters.values())

        engine.step = step
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "make_engine", make_recording_engine)
        overrides = ("training.epochs=2", "student.init_weight_mix=0.2", "student.projection=batch_norm_mlp")
        spec, tables = make_spec(recipe_with(GRAPHS, *overrides))
        result = train(spec, tables)
    assert len(addresses) == result.steps and len(result.state.scores) > 2
    assert all(each == addresses[0] for each in addresses)


def test_a_machine_without_a_gpu_warns_that_steps_run_eagerly(recipe_with: MakeRecipe) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    spec, tables = make_spec(recipe_with(GRAPHS, "training.max_steps=2"))
    events: list[Event] = []
    assert train(spec, tables, events).state.finished
    (warning,) = [event for event in events if isinstance(event, LogMessage) and "training.cuda_graphs" in event.text]
    assert warning.warning


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (("training.engine=auto",), "engine: torch"),
        (("training.batch_size=64", "training.workers=2", "training.grad_cache_chunk=1"), "grad_cache_chunk: null"),
        (("training.gradient_accumulation=2",), "gradient_accumulation: 1"),
        (("training.engine=deepspeed", "training.zero_stage=1"), "write engine: torch, zero_stage: 0, or"),
        (("training.batch_size=64", "training.grad_cache_chunk=2"), "grad_cache_chunk: null"),
        (("training.batch_size=64", "training.dropout_rng_streams=32"), "dropout_rng_streams: null"),
        (("objective.custom={mine: {class_path: 'a.py:Mine'}}",), "objective.custom: {}"),
        (("student.trust_remote_code=true",), "student.trust_remote_code: false"),
    ],
)
def test_recipes_whose_steps_cannot_be_recorded_are_refused(
    overrides: tuple[str, ...], fix: str, recipe_with: MakeRecipe
) -> None:
    with fails_with(InvalidValueError, fix, "cuda_graphs: off"):
        recipe_with(GRAPHS, *overrides)
