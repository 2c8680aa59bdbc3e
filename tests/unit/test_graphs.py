"""Which steps are recorded as CUDA graphs, and the messages about others. Equal weights: tests/unit/test_gpu_steps.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from distcse.compat.torch import GraphRNG
from distcse.errors import CUDAGraphError, InvalidValueError
from distcse.events import Event, LogMessage
from distcse.losses import objective
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory
from distcse.training import cuda_graphs as graphs
from distcse.training.cuda_graphs import CudaGraphStep
from distcse.training.task import StepInputs
from tests.failures import fails_with
from tests.gpusim import simulated
from tests.jobs import make_spec, train
from tests.weights import assert_equal_weights, weights_of

MakeRecipe = Callable[..., Recipe]
GRAPHS = "training.cuda_graphs=on"


class Recorder:
    """Counts recordings."""

    recorded = 0

    def warming(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(
        self, call: Callable[[], dict[str, Tensor]], seeds: Sequence[int]
    ) -> Callable[[Sequence[int]], dict[str, Tensor]]:
        self.recorded += 1
        return lambda new_seeds: call()


@pytest.mark.parametrize(("streams", "recorded"), [(2, 8), (8, 4), (16, 2)])
def test_shapes_of_many_streams_are_recorded_less_often(streams: int, recorded: int) -> None:
    """Twelve shapes, each twice: a step is recorded when its shape comes again."""
    recorder, seeds = Recorder(), tuple(range(streams))
    step = CudaGraphStep(lambda *_: {"loss": torch.zeros(())}, recorder)  # type: ignore[arg-type]
    engine = SimpleNamespace(device=torch.device("cpu"))
    for number in [*range(12), *range(12)]:
        step(engine, None, StepInputs(seeds, torch.zeros(number + 1)), 0.1)  # type: ignore[arg-type]
    assert recorder.recorded == recorded


def test_a_seed_that_a_recording_does_not_know_or_use_is_refused() -> None:
    """With no random states: what is not in the step's inputs would never change in replays."""
    generator: Any = SimpleNamespace(
        clone_state=lambda: generator, graphsafe_get_state=lambda: generator, graphsafe_set_state=id
    )
    rng = GraphRNG(SimpleNamespace(default_generators=[generator], current_device=lambda: 0), [3, 5])
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


def test_a_failed_recording_is_an_error_or_continues_with_eager_steps(
    shared_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that reads a number on the host cannot be recorded."""
    monkeypatch.setattr("distcse.training.trainer.warmup_then_linear", lambda step, *_: 1 - step % 8 / 8)
    shares = objective.cosine_shares

    def read_a_number(views: Any) -> dict[str, Tensor]:
        assert views.z1.sum().item() == views.z1.sum().item()
        return shares(views)

    monkeypatch.setattr(objective, "cosine_shares", read_a_number)
    runs, said = [], []
    for mode in ("auto", "off"):
        spec, tables = make_spec(
            shared_recipe(
                "training.max_steps=3", "evaluation.dev=none", f"training.lr={2**-10}", f"training.cuda_graphs={mode}"
            )
        )
        events: list[Event] = []
        with simulated():
            assert train(spec, tables, events).state.finished
        runs.append(weights_of(spec.run.path))
        said.append([text for text in messages(events) if "steps run eagerly" in text])
    assert_equal_weights(*runs)
    assert len(said[0]) == 1 and "operation not permitted when stream is capturing" in said[0][0] and not said[1]
    spec, tables = make_spec(shared_recipe("training.max_steps=3", "evaluation.dev=none", GRAPHS))
    with simulated(), fails_with(CUDAGraphError, "operation not permitted", "training.cuda_graphs=off"):
        train(spec, tables)
    _, recipe = RunDirectory.reopen(spec.run.path, ["training.cuda_graphs=off"])
    assert isinstance(recipe, Recipe) and recipe.training.cuda_graphs == "off"


def messages(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, LogMessage)]


def test_a_step_that_cannot_be_recorded_says_why(shared_recipe: MakeRecipe) -> None:
    spec, tables = make_spec(shared_recipe("training.max_steps=1", "training.gradient_accumulation=2"))
    events: list[Event] = []
    with simulated():
        train(spec, tables, events)
    assert [text for text in messages(events) if "to record them, write training.gradient_accumulation: 1" in text]


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
    shared_recipe: MakeRecipe, tiny: Callable[..., Any]
) -> None:
    spec, tables = make_spec(shared_recipe(GRAPHS, f"student.backbone={tiny('modernbert')}"))
    with fails_with(CUDAGraphError, spec.recipe.student.backbone, "training.cuda_graphs=off"):
        train(spec, tables)


def test_a_machine_without_a_gpu_warns_that_steps_run_eagerly(shared_recipe: MakeRecipe) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    spec, tables = make_spec(shared_recipe(GRAPHS, "training.max_steps=2"))
    events: list[Event] = []
    assert train(spec, tables, events).state.finished
    (warning,) = [event for event in events if isinstance(event, LogMessage) and "training.cuda_graphs" in event.text]
    assert warning.warning


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (("training.engine=auto",), "engine: torch"),
        (("training.batch_size=64", "training.workers=2", "training.grad_cache_chunk=1"), "workers: 1"),
        (("training.gradient_accumulation=2",), "gradient_accumulation: 1"),
        (("training.engine=deepspeed", "training.zero_stage=1"), "write engine: torch, zero_stage: 0, or"),
        (("training.batch_size=64", "training.grad_cache_chunk=2"), "grad_cache_chunk: null"),
        (("training.batch_size=64", "training.dropout_rng_streams=32"), "dropout_rng_streams: null"),
        (("objective.custom={mine: {class_path: 'a.py:Mine'}}",), "objective.custom: {}"),
        (("student.trust_remote_code=true",), "student.trust_remote_code: false"),
    ],
)
def test_recipes_whose_steps_cannot_be_recorded_are_refused(
    overrides: tuple[str, ...], fix: str, shared_recipe: MakeRecipe
) -> None:
    with fails_with(InvalidValueError, fix, "cuda_graphs: off"):
        shared_recipe(GRAPHS, *overrides)
