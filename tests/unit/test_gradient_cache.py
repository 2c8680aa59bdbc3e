"""Gradients of GradCache's chunks are those of full batches, and FusedAdamW makes of them what PyTorch's optimizer does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distcse.errors import InvalidValueError
from distcse.recipe import LoopSection, Recipe
from distcse.teachers.lists import LocalTeacherClient
from distcse.teachers.teacher import open_table_teacher
from distcse.training.engines.fused_adamw import MOMENTS, FusedAdamW
from tests.counting import passes_of
from tests.failures import fails_with
from tests.jobs import make_recipe, make_spec, train
from tests.models import make_masked_lm
from tests.training_step import TrainingStep
from tests.weights import assert_same_learning, weights_of
from tests.workers import run_workers

MakeRecipe = Callable[..., Recipe]
WITHOUT_EVALUATION = (
    "evaluation.dev=none",
    "evaluation.num_heldout=0",
    "evaluation.final_suites=[]",
    "training.max_steps=3",
    "student.layers=[1]",
)
DETECTION = (
    *("objective.rank=null", "student.projection=batch_norm_mlp"),
    *("objective.detection.weight=0.5", "objective.detection.sampling=sample"),
)


def loss_and_gradient(recipe: Recipe) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of the first batch and its gradient by parameter name."""
    spec, tables = make_spec(recipe)
    teachers = zip(recipe.teachers.encoders, tables, strict=True)
    step = TrainingStep(spec, [LocalTeacherClient(open_table_teacher(teacher, table)) for teacher, table in teachers])
    step.task.model.train()
    share, _ = step.loss()
    step.engine.backward(share)
    named = step.task.model.named_parameters()
    return share.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_equal(one: Recipe, other: Recipe) -> None:
    (loss, found), (expected_loss, expected) = loss_and_gradient(one), loss_and_gradient(other)
    torch.testing.assert_close(loss, expected_loss, atol=0, rtol=1e-6)
    assert found.keys() == expected.keys() and len(found) > 20
    difference = torch.cat([(found[name] - expected[name]).flatten() for name in found]).norm()
    assert difference <= 1e-6 * torch.cat([each.flatten() for each in expected.values()]).norm()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_gradient_equals_that_of_the_full_batch(shared_recipe: MakeRecipe, dropout: float, precision: str) -> None:
    chunks, streams = (
        shared_recipe(
            *WITHOUT_EVALUATION,
            f"student.dropout={dropout}",
            f"training.precision={precision}",
            "student.pooling=cls",
            part,
        )
        for part in ("training.grad_cache_chunk=4", "training.dropout_rng_streams=4")
    )
    if precision == "fp32":
        assert_equal(chunks, streams)
    else:  # in both runs, bf16 rounds the gradients of weights once per chunk
        (loss, found), (expected_loss, expected) = loss_and_gradient(chunks), loss_and_gradient(streams)
        assert torch.equal(loss, expected_loss)
        both = [torch.cat([each[name].flatten() for name in found]) for each in (found, expected)]
        assert torch.cosine_similarity(*both, dim=0) > 0.9999


def test_the_discriminators_forward_pass_is_recomputed_with_the_same_edits(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    generator = make_masked_lm(tmp_path / "generator", tiny("bert"))
    overrides = (*WITHOUT_EVALUATION, *DETECTION, f"objective.detection.generator={generator}")

    def recipe(part: str) -> Recipe:
        folder = tmp_path / part.replace("=", "-")
        folder.mkdir()
        return make_recipe(folder, tiny("bert"), [], sentences, *overrides, part)

    assert_equal(recipe("training.grad_cache_chunk=8"), recipe("training.dropout_rng_streams=2"))


def test_saved_activations_do_not_grow_with_the_batch(shared_recipe: MakeRecipe) -> None:
    def count_saved(*overrides: str) -> tuple[int, int]:
        """Count the floats that the forward pass saves for the backward pass, and the encoder's forward passes in a step."""
        spec, _ = make_spec(
            shared_recipe(*WITHOUT_EVALUATION, "objective.rank=null", "objective.consistency=null", *overrides)
        )
        step, sizes = TrainingStep(spec, []), []

        def keep(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel() if tensor.dtype == torch.float32 else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step.engine.forward(step.task.prepare_batch(0, step.engine.device).model_inputs)
        with passes_of() as passed:
            step()
        return sum(sizes), passed.calls

    small, large = (
        count_saved("training.batch_size=8", "training.grad_cache_chunk=8"),
        count_saved("training.batch_size=64", "training.grad_cache_chunk=8"),
    )
    full = count_saved("training.batch_size=64", "training.dropout_rng_streams=8")
    assert full[1] == 8 and large[1] == 8 + 7  # the last chunk's activations are not recomputed
    assert large[0] == pytest.approx(small[0], rel=0.1) and 0 < small[0] < full[0] / 6


def _train_both(*runs: Any) -> None:
    for spec, tables in runs:
        train(spec, tables)


@pytest.mark.slow
def test_two_workers_and_deepspeed_give_the_same_weights(shared_recipe: MakeRecipe) -> None:
    """Lists contain both workers' chunks."""

    def spec_of(*overrides: str) -> Any:
        return make_spec(shared_recipe(*WITHOUT_EVALUATION, "training.grad_cache_chunk=4", *overrides))

    alone, together = spec_of(), spec_of()
    stages = [spec_of("training.engine=deepspeed", f"training.zero_stage={stage}") for stage in (2, 3)]
    _train_both(alone, stages[1])
    run_workers(_train_both, 2, together, stages[0])
    for spec, _ in (together, *stages):
        assert_same_learning(weights_of(alone[0].run.path), weights_of(spec.run.path))


def test_chunks_that_do_not_fit_are_refused(shared_recipe: MakeRecipe) -> None:
    with fails_with(InvalidValueError, "grad_cache_chunk", "5", "1, 2, 4, 8, 16"):
        shared_recipe("training.grad_cache_chunk=5")
    with fails_with(InvalidValueError, "grad_cache_chunk", "dropout_rng_streams"):
        shared_recipe("training.grad_cache_chunk=4", "training.dropout_rng_streams=4")


# -- the optimizer -------------------------------------------------------------------------------------------------------


def parameters() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(size, generator=draw)) for name, size in (("a", (5, 3)), ("b", (7,)))}


def set_gradients(named: dict[str, nn.Parameter], step: int, names: str = "ab", size: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(100 + step)
    for name, parameter in named.items():
        gradient = size * torch.randn(parameter.shape, generator=draw)
        parameter.grad = gradient if name in names else None


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("max_norm", "size"), [(0.0, 1.0), (1.0, 10.0), (1.0, 1e-3)])
def test_weights_and_moments_equal_those_of_pytorch(decay: float, max_norm: float, size: float) -> None:
    mine, theirs = parameters(), parameters()
    ours = FusedAdamW(mine, LoopSection(weight_decay=decay, gradient_clipping=max_norm))
    groups = [{"params": [theirs["a"]], "weight_decay": decay}, {"params": [theirs["b"]], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=1.0, foreach=False)
    for step in range(10):
        lr = 0.1 / (1 + step)
        set_gradients(mine, step, size=size)
        set_gradients(theirs, step, size=size)
        if max_norm:
            nn.utils.clip_grad_norm_(theirs.values(), max_norm)
        for group in plain.param_groups:
            group["lr"] = lr
        ours.step(lr)
        plain.step()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=2e-5, atol=1e-6)
            for kind in MOMENTS:
                torch.testing.assert_close(
                    ours.moments[name][kind], plain.state[theirs[name]][kind], rtol=2e-5, atol=1e-9
                )


def test_a_parameter_without_a_gradient_is_not_updated() -> None:
    named = parameters()
    before = named["b"].detach().clone()
    optimizer = FusedAdamW(named, LoopSection(weight_decay=0.1))
    set_gradients(named, 0, names="a")
    optimizer.step(0.1)
    assert torch.equal(named["b"], before) and set(optimizer.moments) == {"a"}
    set_gradients(named, 1)
    optimizer.step(0.1)
    assert not torch.equal(named["b"], before)
    optimizer.zero_grad()
    assert all(p.grad is None for p in named.values())
