"""False negatives: pairs that the teachers find similar are no negatives of InfoNCE."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from distcse.errors import InvalidValueError
from distcse.losses import info_nce, negative_weights
from distcse.recipe import Recipe
from distcse.runs.distillation.distillation_task import BatchLoader, DistillationTask
from distcse.teachers.lists import LocalTeacherClient
from distcse.teachers.teacher import open_table_teacher
from tests.failures import fails_with
from tests.jobs import make_spec, train

MakeRecipe = Callable[..., Recipe]


def test_weights_of_false_negatives() -> None:
    lists = torch.tensor([[0.2, 1.0, 0.95, 0.8], [0.1, 0.99, 1.0, 0.9]])
    mask = negative_weights(lists, 0.9, "mask", offset=1)
    assert mask.tolist() == [[1, 1, 0, 1], [1, 0, 1, 0]]
    soft = negative_weights(lists, 0.9, "soften", offset=1)
    torch.testing.assert_close(soft, torch.tensor([[1, 1, 0.5, 1], [1, 0.1, 1, 1.0]]), atol=1e-5, rtol=0)
    similarities = torch.tensor([[0.1, 0.9, 0.8, 0.3], [0.2, 0.5, 0.7, 0.6]], dtype=torch.float64)
    terms = [math.exp(s / 0.1) for s in (0.1, 0.9, 0.3)]
    found = info_nce(similarities, 0.1, 1, mask)
    assert float(found[0]) == pytest.approx(-math.log(terms[1] / sum(terms)), abs=1e-12)
    at = similarities.clone().requires_grad_()
    info_nce(at, 0.1, 1, mask).sum().backward()
    assert at.grad is not None and float(at.grad[0, 2]) < 1e-300 and at.grad.isfinite().all()


@pytest.mark.parametrize("tau1", [1e-4, 1e-3, 0.05])
def test_a_masked_negative_has_no_effect_at_any_temperature(tau1: float) -> None:
    """Even if it is more similar to the row than the positive."""
    similarities = torch.tensor([[0.9, 0.99, 0.1]])
    mask = negative_weights(torch.tensor([[1.0, 0.95, 0.2]]), 0.9, "mask")
    without = info_nce(similarities[:, [0, 2]], tau1)
    assert torch.equal(info_nce(similarities, tau1, weights=mask), without)


def test_false_negatives_need_teachers(recipe_with: MakeRecipe) -> None:
    with fails_with(InvalidValueError, "objective.info_nce.false_negatives", "teachers"):
        recipe_with("objective.info_nce.false_negatives={}", "teachers.encoders=[]", "objective.rank=null")


def test_a_run_finds_false_negatives_by_the_teachers_weighted_mean(recipe_with: MakeRecipe) -> None:
    spec, tables = make_spec(
        recipe_with("objective.info_nce.false_negatives={threshold: 0.5, form: soften}", "training.max_steps=2")
    )
    loader = BatchLoader(spec, 0, 1)
    teachers = zip(spec.recipe.teachers.encoders, tables, strict=True)
    task = DistillationTask(
        spec, loader, [LocalTeacherClient(open_table_teacher(teacher, table)) for teacher, table in teachers]
    )
    task.on_start(0)
    found = task.teacher_outputs(0, torch.device("cpu")).similarities
    first, second = (unit @ unit.T for unit in (table.vectors(loader.sampler.batch(0)) for table in tables))
    assert found is not None
    np.testing.assert_allclose(found.numpy(), (first + 2 * second) / 3, atol=1e-6)
    assert train(spec, tables).state.finished
