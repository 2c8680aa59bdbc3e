"""Factorized embeddings: equal vectors where the rank suffices, and a folder that other libraries load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from distcse.errors import EncoderSettingError, UnsupportedModelError
from distcse.events import Reporter
from distcse.models import Encoder
from distcse.models.cpu_kernels import Dropout
from distcse.models.student import factorize_embeddings, helmert_basis
from distcse.recipe import StudentSection
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.models import make_masked_lm

TEXTS = ["A cat sleeps.", "The old woman sings a song in the garden.", "Dogs."]


@pytest.mark.parametrize("kind", ["bert", "roberta", "minilm"])
def test_embeddings_of_low_rank_are_factorized_exactly(kind: str, tiny: Callable[..., Path]) -> None:
    encoder = Encoder.load(tiny(kind), pooling="mean")
    embeddings = encoder.backbone.embeddings
    shared = torch.randn(5, encoder.dimension, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
            weight = getattr(embeddings, name).weight
            weight.copy_(torch.randn(len(weight), 5, generator=torch.Generator().manual_seed(1)) @ shared)
        embeddings.LayerNorm.weight.uniform_(0.5, 1.5)  # type: ignore[operator, union-attr]
        embeddings.LayerNorm.bias.uniform_(-0.5, 0.5)  # type: ignore[operator, union-attr]
    before = encoder.encode(TEXTS)
    encoder.backbone = factorize_embeddings(encoder.backbone, 6)  # five directions, and one for the mean of 0
    np.testing.assert_allclose(encoder.encode(TEXTS), before, atol=2e-5)


def test_a_larger_embedding_size_is_more_accurate(tiny: Callable[..., Path]) -> None:
    encoder = Encoder.load(tiny("minilm"), pooling="mean")
    before, plain = encoder.encode(TEXTS, normalize=True), encoder.backbone
    errors = []
    for dimension in (4, 16, 47):
        encoder.backbone = factorize_embeddings(plain, dimension)
        errors.append(float(np.abs(encoder.encode(TEXTS, normalize=True) - before).mean()))
    assert errors[0] > errors[1] > errors[2]


def test_a_factorized_student_is_trained_and_loaded_by_other_libraries(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("bert")], sentences, "student.embedding_size=8")
    fresh = Encoder.from_section(recipe.student)
    dropouts = {type(module) for module in fresh.backbone.modules() if isinstance(module, torch.nn.Dropout)}
    assert dropouts == {Dropout}
    result = run(recipe, Reporter())
    student = Encoder.load(result.directory.model)
    assert student.backbone.config.model_type == "electra" and student.backbone.config.embedding_size == 8
    full = Encoder.from_section(recipe.student.model_copy(update={"embedding_size": None}))
    assert sum(p.numel() for p in student.parameters()) < 0.8 * sum(p.numel() for p in full.parameters())
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(result.directory.model), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(student.encode(TEXTS), theirs, atol=1e-5)


@pytest.mark.parametrize("dimension", [2, 8, 128])
def test_helmert_rows_are_orthonormal_with_sum_0(dimension: int) -> None:
    rows = helmert_basis(dimension)
    torch.testing.assert_close(rows @ rows.T, torch.eye(dimension - 1, dtype=torch.float64))
    torch.testing.assert_close(rows.sum(dim=1), torch.zeros(dimension - 1, dtype=torch.float64))


def test_a_factorized_student_without_dropout_has_none(tiny: Callable[..., Path]) -> None:
    section = StudentSection(backbone=str(tiny("bert")), pooling="mean", embedding_size=8, dropout=0.0)
    assert not Encoder.from_section(section).has_dropout


def test_a_factorized_student_trains_with_edit_detection(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    detection = f"objective.detection.generator={make_masked_lm(tmp_path / 'generator', tiny('bert'))}"
    overrides = ("student.embedding_size=8", detection, "training.max_steps=2")
    result = run(make_recipe(tmp_path, tiny("bert"), [tiny("bert")], sentences, *overrides), Reporter())
    assert result.train_result.state.finished


def test_other_families_and_sizes_are_refused(tiny: Callable[..., Path]) -> None:
    with fails_with(UnsupportedModelError, "embedding_size", "distilbert"):
        Encoder.from_section(StudentSection(backbone=str(tiny("distilbert")), pooling="mean", embedding_size=8))
    with fails_with(EncoderSettingError, "embedding_size is 32", "2 to 31"):
        Encoder.from_section(StudentSection(backbone=str(tiny("bert")), pooling="mean", embedding_size=32))
