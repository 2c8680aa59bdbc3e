"""Dev scores of a run tokenize their sentences once, and are those of the plain way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distcse.devices.device import default_device
from distcse.errors import ArgumentError
from distcse.evaluation import VectorModel, agreement
from distcse.models import Encoder, frozen_pass
from distcse.models.encoder import KeptTokens
from distcse.recipe import Recipe
from distcse.runs.distillation.batch_loader import BatchLoader
from distcse.runs.distillation.dev_metric import DevMetric, read_labelled_dev, teacher_similarities
from distcse.runs.mutual.dev_pairs import DevPairs
from distcse.runs.mutual.pair_task import PairTask
from distcse.teachers.lists import LocalTeacherClient
from distcse.teachers.teacher import open_table_teacher
from tests.failures import fails_with
from tests.gpusim import simulated
from tests.jobs import make_spec
from tests.pairs import bi_tokens, make_mutual_recipe, make_pairs


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that encoders have tokenized."""
    from distcse.models import encoder

    texts, tokenize = list[str](), encoder.tokenize  # type: ignore[attr-defined]

    def counting(tokenizer: Any, part: Sequence[str], max_length: int) -> list[list[int]]:
        texts.extend(part)
        return tokenize(tokenizer, part, max_length)  # type: ignore[no-any-return]

    monkeypatch.setattr(encoder, "tokenize", counting)
    return texts


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated GPU has several chunks of texts."""
    monkeypatch.setattr(frozen_pass, "FIRST_TEXTS", 8)


def change(encoder: Encoder) -> None:
    """Change the weights, as training does."""
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.mul_(1.25)


@pytest.mark.parametrize(("dev", "on_gpu"), [("stsb", True), ("agreement", False)])
def test_dev_scores_of_a_student(
    dev: str,
    on_gpu: bool,
    recipe_with: Callable[..., Recipe],
    labelled: Path,
    tokenized: list[str],
    small_chunks: None,
) -> None:
    recipe = recipe_with(f"evaluation.data={labelled}", f"evaluation.dev={dev}", "student.prompt='a '")
    spec, tables = make_spec(recipe)
    clients = [
        LocalTeacherClient(open_table_teacher(teacher, table))
        for teacher, table in zip(recipe.teachers.encoders, tables, strict=True)
    ]
    loader = BatchLoader(spec, 0, 1)
    metric, sets = DevMetric.of(recipe, loader.corpus, loader.held_out, clients), read_labelled_dev(recipe)
    assert metric is not None

    def plain_score(encoder: Encoder) -> float:
        if sets is not None:
            return sets.score(VectorModel.of(encoder))
        similarities = teacher_similarities(recipe, loader.corpus, loader.held_out, clients)
        return agreement(encoder.encode(loader.corpus.texts(loader.held_out), normalize=True), similarities)

    scores, expected, counts = [], [], []
    with ExitStack() as stack:
        if on_gpu:
            stack.enter_context(simulated())
        encoder = Encoder.from_section(recipe.student).to(default_device())
        for _ in range(2):
            tokenized.clear()
            scores.append(metric.score(encoder))
            counts.append(len(tokenized))
            expected.append(plain_score(encoder))
            change(encoder)
    assert scores == expected and len({*scores}) == 2
    assert counts[0] > 0 and counts[1] == 0


def test_dev_scores_of_a_group(
    labelled: Path, tiny: Callable[..., Path], sentences: list[str], tmp_path: Path, tokenized: list[str]
) -> None:
    recipe = make_mutual_recipe(
        tmp_path, {"bert": tiny("bert")}, sentences, f"evaluation.data={labelled}", "evaluation.dev=stsb"
    )
    dev, encoder = DevPairs.of(recipe), Encoder.from_section(recipe.groups[0])
    assert dev is not None
    tokens = bi_tokens(encoder, make_pairs(tmp_path, sentences[:32], sentences[32:64]))
    task = PairTask(encoder, tokens, np.zeros(32, np.float32), recipe.bi, dev, 100, 0)
    for number in range(2):
        tokenized.clear()
        score = task.evaluate()
        assert bool(tokenized) == (number == 0)
        assert score == dev.score(VectorModel.of(encoder))
        change(encoder)


def test_few_texts_are_kept(tiny: Callable[..., Path], sentences: list[str], tokenized: list[str]) -> None:
    """Others are tokenized anew, and all vectors are the plain ones."""
    encoder, few, many = Encoder.load(tiny("bert"), pooling="mean"), sentences[:4], sentences[4:40]
    kept = KeptTokens(max_characters=sum(map(len, [*few, *many])) - 1)
    for _ in range(2):
        for texts in (few, many):
            np.testing.assert_array_equal(kept.encode(encoder, texts), encoder.encode(texts))
    assert len(tokenized) == (1 + 2) * len(few) + (2 + 2) * len(many)
    with fails_with(ArgumentError, "texts[1]"):
        kept.encode(encoder, ["A man.", None])  # type: ignore[list-item]
