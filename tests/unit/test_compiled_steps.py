"""Training steps with compiled layers: the same weights as without; evaluations use the layers as they are; every way out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

from distcse.compat.torch import GraphRNG, compile_layer
from distcse.events import Event, Listener, LogMessage
from distcse.models import Encoder
from distcse.recipe import Recipe
from distcse.training import trainer
from distcse.training.compiled_step import MIN_STEPS, CompiledStep, CompileMode, open_compiled_step, trained_layers
from distcse.training.dropout_rng import recorded_rng
from distcse.training.task import TakeStep
from tests.jobs import make_spec, train
from tests.weights import assert_equal_weights, assert_same_learning, weights_of

MakeRecipe = Callable[..., Recipe]
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
