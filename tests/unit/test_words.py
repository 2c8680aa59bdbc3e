"""Narrow word embeddings: the same vectors where nothing is cut away, and a folder that everybody reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from distcse.errors import EncoderError
from distcse.events import Reporter
from distcse.experiments.distillation.run import run
from distcse.models import Encoder
from distcse.models.factorized_embeddings import _helmert, factorize_embeddings
from distcse.models.fast.dropout import Dropout
from distcse.recipe import StudentSection
from tests.jobs import make_recipe

TEXTS = ["A cat sleeps.", "The old woman sings a song in the garden.", "Dogs."]


def of_rank(weight: Tensor, rank: int) -> None:
    left, sizes, right = torch.linalg.svd(weight.detach().double(), full_matrices=False)
    sizes[rank:] = 0
    weight.data.copy_((left * sizes) @ right)


@pytest.mark.parametrize("kind", ["bert", "roberta", "minilm"])
def test_nothing_changes_where_the_directions_hold_everything(kind: str, tiny: Callable[..., Path]) -> None:
    encoder = Encoder.load(tiny(kind), pooling="mean")
    embeddings = encoder.backbone.embeddings
    shared = torch.randn(5, encoder.dimension, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
            weight = getattr(embeddings, name).weight
            weight.copy_(torch.randn(len(weight), 5, generator=torch.Generator().manual_seed(1)) @ shared)
        embeddings.LayerNorm.weight.uniform_(0.5, 1.5)
        embeddings.LayerNorm.bias.uniform_(-0.5, 0.5)
    before = encoder.encode(TEXTS)
    encoder.backbone = factorize_embeddings(encoder.backbone, 6)  # five directions, and the one that is left free
    noises = {type(module) for module in encoder.backbone.modules() if isinstance(module, torch.nn.Dropout)}
    assert noises == {Dropout}
    np.testing.assert_allclose(encoder.encode(TEXTS), before, atol=2e-5)


def test_the_more_numbers_the_nearer(tiny: Callable[..., Path]) -> None:
    encoder = Encoder.load(tiny("minilm"), pooling="mean")
    before, plain = encoder.encode(TEXTS, normalize=True), encoder.backbone
    apart = []
    for dimension in (4, 16, 47):
        encoder.backbone = factorize_embeddings(plain, dimension)
        apart.append(float(np.abs(encoder.encode(TEXTS, normalize=True) - before).mean()))
    assert apart[0] > apart[1] > apart[2]


def test_a_narrow_student_learns_and_is_read_by_others(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("bert")], sentences, "student.embedding_size=8")
    result = run(recipe, Reporter())
    student = Encoder.load(result.directory.model)
    assert student.backbone.config.model_type == "electra" and student.backbone.config.embedding_size == 8
    whole = Encoder.from_section(recipe.student.model_copy(update={"embedding_size": None}))
    assert sum(p.numel() for p in student.parameters()) < 0.8 * sum(p.numel() for p in whole.parameters())
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(result.directory.model), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(student.encode(TEXTS), theirs, atol=1e-5)


@pytest.mark.parametrize("dimension", [2, 8, 128])
def test_helmerts_rows(dimension: int) -> None:
    rows = _helmert(dimension)
    torch.testing.assert_close(rows @ rows.T, torch.eye(dimension - 1, dtype=torch.float64))
    torch.testing.assert_close(rows.sum(dim=1), torch.zeros(dimension - 1, dtype=torch.float64))


def test_a_narrow_student_without_dropout_has_none(tiny: Callable[..., Path]) -> None:
    section = StudentSection(backbone=str(tiny("bert")), pooling="mean", embedding_size=8, dropout=0.0)
    assert not Encoder.from_section(section).has_dropout


def test_a_narrow_student_detects_edits(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    overrides = ("student.embedding_size=8", "objective.detection={operation: deletion}", "training.max_steps=2")
    result = run(make_recipe(tmp_path, tiny("bert"), [tiny("bert")], sentences, *overrides), Reporter())
    assert result.outcome.state.finished


def test_what_cannot_be_is_refused(tiny: Callable[..., Path]) -> None:
    with pytest.raises(EncoderError, match="not distilbert"):
        Encoder.from_section(StudentSection(backbone=str(tiny("distilbert")), pooling="mean", embedding_size=8))
    with pytest.raises(EncoderError, match="allowed: 2 to 31"):
        Encoder.from_section(StudentSection(backbone=str(tiny("bert")), pooling="mean", embedding_size=32))
