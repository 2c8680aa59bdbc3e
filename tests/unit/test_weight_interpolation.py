"""Interpolation of the evaluated and saved student with its initial weights, without any effect on training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from distcse.errors import InvalidValueError
from distcse.events import Reporter
from distcse.models import Encoder
from distcse.models.student import WeightInterpolation
from distcse.recipe import Recipe
from distcse.runs.distillation.batch_loader import BatchLoader
from distcse.runs.distillation.dev_metric import DevMetric
from distcse.teachers.lists import LocalTeacherClient
from distcse.teachers.teacher import open_table_teacher
from distcse.training.checkpoint_files import load_weights
from distcse.training.checkpoints import CheckpointStore
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_recipe, make_spec
from tests.weights import assert_equal_weights, weights_of

MakeRecipe = Callable[..., Recipe]
MIXED = "student.init_weight_mix=0.25"


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    return lambda *overrides: make_recipe(tmp_path, tiny("bert"), [tiny("bert", width=48)], sentences, *overrides)


def test_a_tied_weight_is_interpolated_under_both_names(tiny: Callable[..., Path]) -> None:
    """T5's embeddings are tied: the saved model must equal the evaluated one."""
    encoder = Encoder.load(tiny("t5"), pooling="mean", max_length=16)
    interpolation = WeightInterpolation(encoder, 0.5)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(1)
    with interpolation.applied_to(encoder):
        evaluated = encoder.encode(["A man."])
    encoder.load_state_dict(interpolation.interpolate(encoder.state_dict()))
    np.testing.assert_allclose(encoder.encode(["A man."]), evaluated, atol=1e-6)


def test_the_saved_student_is_interpolated_and_the_trained_weights_are_not(recipe_with: MakeRecipe) -> None:
    plain = run(recipe_with(), Reporter())
    mixed = run(recipe_with(MIXED), Reporter())
    assert_equal_weights(weights_of(plain.directory.path), weights_of(mixed.directory.path))
    best = CheckpointStore(mixed.directory.path).best()
    assert best is not None
    trained, initial = load_weights(best), Encoder.from_section(mixed.recipe.student).state_dict()
    saved = Encoder.load(mixed.directory.model).state_dict()
    parameters = dict(Encoder.load(mixed.directory.model).named_parameters())
    for name in parameters:
        torch.testing.assert_close(saved[name], 0.75 * trained[f"encoder.{name}"] + 0.25 * initial[name])


@pytest.mark.slow
def test_the_dev_score_is_that_of_the_saved_student(recipe_with: MakeRecipe) -> None:
    result = run(recipe_with(MIXED), Reporter())
    spec, tables = make_spec(result.recipe, result.directory)
    loader = BatchLoader(spec, rank=0, workers=1)
    (teacher,) = result.recipe.teachers.encoders
    clients = [LocalTeacherClient(open_table_teacher(teacher, table)) for table in tables]
    dev = DevMetric.of(result.recipe, loader.corpus, loader.held_out, clients)
    best = result.train_result.state.best
    assert dev is not None and best is not None
    assert dev.score(Encoder.load(result.directory.model)) == pytest.approx(best[1], abs=1e-9)


def test_the_weights_are_restored_after_an_evaluation(tiny: Callable[..., Path]) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="mean")
    interpolation = WeightInterpolation(encoder, 0.3)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(torch.randn_like(weight))
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    with pytest.raises(KeyboardInterrupt), interpolation.applied_to(encoder):
        assert any(not torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())
        raise KeyboardInterrupt
    assert_equal_weights(before, encoder.state_dict())


def test_sharded_weights_cannot_be_interpolated(recipe_with: MakeRecipe) -> None:
    with fails_with(InvalidValueError, "init_weight_mix", "training.zero_stage: 2"):
        recipe_with(MIXED, "training.engine=deepspeed", "training.zero_stage=3")
