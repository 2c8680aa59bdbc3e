"""Factorized embeddings: equal vectors where the rank suffices, and a folder that other libraries load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from distcse.errors import EncoderSettingError, UnsupportedModelError
from distcse.models import Encoder
from distcse.models.cpu_kernels import Dropout
from distcse.models.student import factorize_embeddings
from distcse.recipe import StudentSection
from tests.failures import fails_with
from tests.models import their_vectors

TEXTS = ["A cat sleeps.", "The old woman sings a song in the garden.", "Dogs."]


@pytest.mark.parametrize("kind", ["bert", "roberta"])
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


def test_a_factorized_student_is_saved_for_other_libraries(tiny: Callable[..., Path], tmp_path: Path) -> None:
    section = StudentSection(backbone=str(tiny("bert")), pooling="mean", max_length=16, embedding_size=8)
    student = Encoder.from_section(section)
    dropouts = {type(module) for module in student.backbone.modules() if isinstance(module, torch.nn.Dropout)}
    assert dropouts == {Dropout}
    assert not Encoder.from_section(section.model_copy(update={"dropout": 0.0})).has_dropout
    student.save(tmp_path / "model")
    saved = Encoder.load(tmp_path / "model")
    assert saved.backbone.config.model_type == "electra" and saved.backbone.config.embedding_size == 8
    full = Encoder.from_section(section.model_copy(update={"embedding_size": None}))
    assert sum(p.numel() for p in saved.parameters()) < 0.8 * sum(p.numel() for p in full.parameters())
    np.testing.assert_allclose(saved.encode(TEXTS), student.encode(TEXTS), atol=1e-6)
    np.testing.assert_allclose(their_vectors(tmp_path / "model", TEXTS), saved.encode(TEXTS), atol=1e-5)


def test_other_families_and_sizes_are_refused(tiny: Callable[..., Path]) -> None:
    with fails_with(UnsupportedModelError, "embedding_size", "distilbert"):
        Encoder.from_section(StudentSection(backbone=str(tiny("distilbert")), pooling="mean", embedding_size=8))
    with fails_with(EncoderSettingError, "embedding_size is 32", "2 to 31"):
        Encoder.from_section(StudentSection(backbone=str(tiny("bert")), pooling="mean", embedding_size=32))
