"""Which steps are recorded as CUDA graphs, and compiled layers. Equal weights of recorded steps: tests/unit/test_gpu_steps.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel

from distcse.compat.torch import GraphRNG, compile_layer
from distcse.errors import CUDAGraphError, InvalidValueError
from distcse.events import Event, Listener, LogMessage
from distcse.losses import objective
from distcse.models import Encoder
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory
from distcse.training import cuda_graphs as graphs
from distcse.training import trainer
from distcse.training.compiled_step import MIN_STEPS, CompiledStep, CompileMode, open_compiled_step, trained_layers
from distcse.training.cuda_graphs import CudaGraphStep
from distcse.training.dropout_rng import recorded_rng
from distcse.training.task import StepInputs, TakeStep
from tests.failures import fails_with
from tests.gpusim import simulated
from tests.jobs import make_spec, train
from tests.weights import assert_equal_weights, assert_same_learning, weights_of

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
    overrides: tuple[str, ...], fix: str, shared_recipe: MakeRecipe
) -> None:
    with fails_with(InvalidValueError, fix, "cuda_graphs: off"):
        shared_recipe(GRAPHS, *overrides)


# -- compiled layers -----------------------------------------------------------------------------------------------------


Forward = Callable[..., Any]


@pytest.mark.slow
def test_compiled_layers_give_the_same_weights_and_are_not_used_by_evaluations(
    shared_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured by `torch.compile` for several batch shapes, and run by its backend that changes no kernel."""
    was_training: list[bool] = []

    def compile_forward(forward: Forward) -> Forward:
        compiled = torch.compile(forward, backend="eager", dynamic=True)

        def counted(*inputs: Any, **more: Any) -> Any:
            was_training.append(forward.__self__.training)  # type: ignore[attr-defined]
            return compiled(*inputs, **more)

        return counted

    runs = [
        _train(shared_recipe, monkeypatch, step) for step in (None, partial(_step, compile_forward=compile_forward))
    ]
    assert_equal_weights(*runs)
    assert len(was_training) > 10 and all(was_training)


@pytest.mark.slow
def test_a_compiled_layer_draws_the_same_dropout_when_a_gradient_cache_recomputes_it(
    shared_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchInductor draws other masks than PyTorch; a chunk has the same ones in both of its passes, or weights would differ."""
    step = partial(_step, compile_forward=compile_layer)
    chunks, streams = (
        _train(shared_recipe, monkeypatch, step, "training.max_steps=2", "evaluation.dev=none", part)
        for part in ("training.grad_cache_chunk=8", "training.dropout_rng_streams=2")
    )
    assert_same_learning(chunks, streams)


def test_a_layer_that_cannot_be_compiled_runs_uncompiled(
    shared_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, reasons = list[int](), list[str]()

    def compile_forward(forward: Forward) -> Forward:
        def fails(*inputs: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("no C compiler\nmore of it")
            return forward(*inputs, **more)

        return fails

    step = partial(_step, on_failure=reasons.append, compile_forward=compile_forward)
    assert_equal_weights(_train(shared_recipe, monkeypatch, None), _train(shared_recipe, monkeypatch, step))
    assert reasons == ["no C compiler"] and len(calls) == 2


@pytest.mark.parametrize("recorded", [False, True])
def test_what_is_not_the_compilers_fault_is_raised(recorded: bool, tiny: Callable[..., Any]) -> None:
    """Out of memory, and every error while a CUDA graph is recorded: repeating the step would be recorded too."""
    encoder = Encoder.load(tiny(), pooling="mean")

    class Task:
        model = encoder

    def take_step(*_: Any) -> Any:
        raise RuntimeError("not permitted") if recorded else torch.OutOfMemoryError("no memory")

    step = CompiledStep(take_step, pytest.fail)
    if recorded:
        with recorded_rng(GraphRNG(None, []).drawing), pytest.raises(RuntimeError, match="not permitted"):
            step(None, Task(), None, 0.0)  # type: ignore[arg-type]
    else:
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            step(None, Task(), None, 0.0)  # type: ignore[arg-type]
    assert all("forward" not in vars(layer) for layer in trained_layers(encoder))


def test_one_compilation_serves_all_layers_and_batch_shapes() -> None:
    from torch._dynamo.utils import counters

    config = BertConfig(vocab_size=9, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    model = BertModel(config, add_pooling_layer=False)
    counters.clear()
    for layer in trained_layers(model):
        layer.forward = torch.compile(layer.forward, backend="eager", dynamic=True)
    for rows, length in ((4, 8), (6, 20), (3, 24)):
        seen = torch.ones(rows, 1, 1, length, dtype=torch.bool)
        model(input_ids=torch.ones(rows, length, dtype=torch.long), attention_mask=seen)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("mode", "steps", "recorded", "compiles"),
    [
        ("auto", MIN_STEPS, True, True),
        ("auto", MIN_STEPS - 1, True, False),
        ("auto", MIN_STEPS, False, False),
        ("on", 1, True, True),
        ("on", MIN_STEPS, False, False),
        ("off", MIN_STEPS, True, False),
    ],
)
def test_what_is_compiled(mode: CompileMode, steps: int, recorded: bool, compiles: bool) -> None:
    events: list[Event] = []
    step = open_compiled_step(trainer.training_step, mode, steps, recorded, events.append)
    assert isinstance(step, CompiledStep) == compiles
    messages = [event for event in events if isinstance(event, LogMessage)]
    assert len(messages) == (compiles or (mode == "on" and not recorded))
    assert [message.warning for message in messages] == [not compiles] * len(messages)


def _step(
    take_step: TakeStep,
    compile_forward: Callable[[Forward], Forward] = compile_layer,
    on_failure: Callable[[str], None] = pytest.fail,
) -> TakeStep:
    return CompiledStep(take_step, on_failure, compile_forward)


def _train(
    shared_recipe: MakeRecipe,
    monkeypatch: pytest.MonkeyPatch,
    make_step: Callable[[TakeStep], TakeStep] | None,
    *overrides: str,
) -> dict[str, torch.Tensor]:
    def opened(take_step: TakeStep, mode: CompileMode, steps: int, recorded: bool, emit: Listener) -> TakeStep:
        return take_step if make_step is None else make_step(take_step)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "open_compiled_step", opened)
        # The padded batch on a CPU: packed layers have another forward pass.
        patch.setattr("distcse.models.fast_layers.can_pack", lambda *_: False)
        fixed = ("training.epochs=1", "student.pooling=mean", "training.engine=torch")
        spec, tables = make_spec(shared_recipe(*fixed, *overrides))
        train(spec, tables, [])
        return weights_of(spec.run.path)
