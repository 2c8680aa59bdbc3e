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
from distcse.runs.distillation.distillation_task import BatchLoader, DevMetric
from distcse.storage import open_store
from distcse.teachers.lists import LocalTeacherClient
from distcse.teachers.teacher import open_table_teacher
from distcse.training.checkpoint_files import load_weights
from distcse.training.checkpoints import CheckpointStore
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_recipe, make_spec, train
from tests.weights import assert_equal_weights, weights_of

MakeRecipe = Callable[..., Recipe]
MIXED = "student.init_weight_mix=0.25"


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    teachers, short = [tiny("bert", width=48)], ("training.max_steps=8", "evaluation.final_suites=[]")
    return lambda *overrides: make_recipe(tmp_path, tiny("bert"), teachers, sentences, *short, *overrides)


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


def test_the_saved_and_scored_student_is_interpolated_and_the_trained_weights_are_not(
    recipe_with: MakeRecipe,
) -> None:
    mixed = run(recipe_with(MIXED), Reporter())
    spec, tables = make_spec(recipe_with())
    train(spec, tables)
    assert_equal_weights(weights_of(spec.run.path), weights_of(mixed.directory.path))
    best = CheckpointStore(open_store(mixed.directory.path)).best()
    assert best is not None
    trained, initial = load_weights(best), Encoder.from_section(mixed.recipe.student).state_dict()
    saved = Encoder.load(mixed.directory.model)
    for name, weight in saved.named_parameters():
        torch.testing.assert_close(weight.detach(), 0.75 * trained[f"encoder.{name}"] + 0.25 * initial[name])
    loader = BatchLoader(make_spec(mixed.recipe, mixed.directory)[0], rank=0, workers=1)
    (teacher,) = mixed.recipe.teachers.encoders
    clients = [LocalTeacherClient(open_table_teacher(teacher, table)) for table in tables]
    dev = DevMetric.of(mixed.recipe, loader.corpus, loader.held_out, clients)
    score = mixed.train_result.state.best
    assert dev is not None and score is not None
    assert dev.score(saved) == pytest.approx(score[1], abs=1e-9)


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
