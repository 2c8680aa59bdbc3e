"""GradCache chunks compared with full batches: the same loss and the same gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distcse.errors import InvalidValueError
from distcse.recipe import Recipe
from distcse.teachers.lists import LocalTeacherClient
from distcse.teachers.teacher import open_table_teacher
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
DETECTION = ("objective.rank=null", "student.projection=batch_norm_mlp", "objective.detection.weight=0.5")


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


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("training.grad_cache_chunk=5",), ("grad_cache_chunk", "5", "1, 2, 4, 8, 16")),
        (
            ("training.grad_cache_chunk=4", "training.dropout_rng_streams=4"),
            ("grad_cache_chunk", "dropout_rng_streams"),
        ),
    ],
)
def test_chunks_that_do_not_fit_are_refused(
    shared_recipe: MakeRecipe, overrides: tuple[str, ...], named: tuple[str, ...]
) -> None:
    with fails_with(InvalidValueError, *named):
        shared_recipe(*overrides)
