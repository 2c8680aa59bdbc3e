"""Batches in chunks whose activations are forgotten, against the same batches in one go: the same loss, the same gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.counting import passes_of
from benchmarks.material import OurStep
from distcse.errors import RecipeError
from distcse.recipe import Recipe
from distcse.teachers.ensemble import LocalTeacherClient
from distcse.teachers.serving import serving
from tests.jobs import make_recipe, make_spec, train
from tests.models import make_masked_lm
from tests.weights import assert_same_learning, weights_of
from tests.workers import run_workers

MakeRecipe = Callable[..., Recipe]
QUIET = ("evaluation.dev=none", "evaluation.num_heldout=0", "evaluation.final_suites=[]", "training.max_steps=4")
DETECTION = ("objective.rank=null", "student.projection=batch_norm_mlp", "objective.detection.weight=0.5")


def gradient(recipe: Recipe) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the first batch and its gradient."""
    spec, tables = make_spec(recipe)
    teachers = zip(recipe.teachers.encoders, tables, strict=True)
    step = OurStep(spec, [LocalTeacherClient(serving(teacher, table)) for teacher, table in teachers])
    step.task.model.train()
    share, _ = step.loss()
    step.engine.backward(share)
    named = step.task.model.named_parameters()
    return share.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_equal(one: Recipe, other: Recipe) -> None:
    (loss, found), (plain, expected) = gradient(one), gradient(other)
    torch.testing.assert_close(loss, plain, atol=0, rtol=1e-6)
    assert found.keys() == expected.keys() and len(found) > 20
    apart = torch.cat([(found[name] - expected[name]).flatten() for name in found]).norm()
    assert apart <= 1e-6 * torch.cat([each.flatten() for each in expected.values()]).norm()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_gradient_is_that_of_the_whole_batch(recipe_with: MakeRecipe, dropout: float, precision: str) -> None:
    overrides = (*QUIET, f"student.dropout={dropout}", f"training.precision={precision}", "student.pooling=cls")
    if precision == "fp32":
        assert_equal(
            recipe_with(*overrides, "training.grad_cache_chunk=4"),
            recipe_with(*overrides, "training.dropout_rng_streams=4"),
        )
    else:  # bf16 rounds the gradients of weights once a chunk, in either way
        (loss, found), (plain, expected) = (
            gradient(recipe_with(*overrides, part))
            for part in ("training.grad_cache_chunk=4", "training.dropout_rng_streams=4")
        )
        assert torch.equal(loss, plain)
        both = [torch.cat([each[name].flatten() for name in found]) for each in (found, expected)]
        assert torch.cosine_similarity(*both, dim=0) > 0.9999


def test_a_discriminators_pass_is_made_again_with_the_same_edits(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    generator = make_masked_lm(tmp_path / "generator", tiny("bert"))
    overrides = (*QUIET, *DETECTION, f"objective.detection.generator={generator}")

    def recipe(part: str) -> Recipe:
        folder = tmp_path / part.replace("=", "-")
        folder.mkdir()
        return make_recipe(folder, tiny("bert"), [], sentences, *overrides, part)

    assert_equal(recipe("training.grad_cache_chunk=8"), recipe("training.dropout_rng_streams=2"))


def test_what_is_kept_does_not_grow_with_the_batch(recipe_with: MakeRecipe) -> None:
    def kept(*overrides: str) -> tuple[int, int]:
        """Numbers that the encoder's pass leaves for its gradient, and its passes in a step."""
        spec, _ = make_spec(recipe_with(*QUIET, "objective.rank=null", "objective.consistency=null", *overrides))
        step, sizes = OurStep(spec, []), []

        def keep(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel() if tensor.dtype == torch.float32 else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step.engine.forward(step.task.prepare_batch(0, step.engine.device).model)
        with passes_of() as passed:
            step()
        return sum(sizes), passed.calls

    small, large = (
        kept("training.batch_size=8", "training.grad_cache_chunk=8"),
        kept("training.batch_size=64", "training.grad_cache_chunk=8"),
    )
    plain = kept("training.batch_size=64", "training.dropout_rng_streams=8")
    assert plain[1] == 8 and large[1] == 8 + 7  # what the last one left is there
    assert large[0] == pytest.approx(small[0], rel=0.1) and 0 < small[0] < plain[0] / 6


def _train(spec: Any, tables: Any) -> Any:
    return train(spec, tables)


@pytest.mark.parametrize("stage", [2, 3])
def test_every_stage_learns_what_one_worker_does_and_two_as_well(recipe_with: MakeRecipe, stage: int) -> None:
    """The lists span both workers' chunks."""
    alone, tables = make_spec(recipe_with(*QUIET, "training.grad_cache_chunk=4"))
    train(alone, tables)
    engine = ("training.engine=deepspeed", f"training.zero_stage={stage}")
    sharded, tables = make_spec(recipe_with(*QUIET, "training.grad_cache_chunk=4", *engine))
    if stage == 2:
        run_workers(_train, 2, sharded, tables)
    else:
        train(sharded, tables)
    assert_same_learning(weights_of(alone.run), weights_of(sharded.run))


def test_two_workers_of_the_plain_engine_learn_what_one_does(recipe_with: MakeRecipe) -> None:
    overrides = (*QUIET, "training.grad_cache_chunk=4")
    alone, tables = make_spec(recipe_with(*overrides))
    train(alone, tables)
    together, tables = make_spec(recipe_with(*overrides))
    run_workers(_train, 2, together, tables)
    assert_same_learning(weights_of(alone.run), weights_of(together.run))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ("training.grad_cache_chunk=5",),
            "chunk is 5, which does not divide a worker's 16 rows; allowed: 1, 2, 4, 8, 16",
        ),
        (("training.grad_cache_chunk=4", "training.dropout_rng_streams=4"), "keep one of them"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(recipe_with: MakeRecipe, overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        recipe_with(*overrides)
