"""`models.fast`: every shortcut computes what the plain forward pass does, and `off` uses none in any model of a run."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from distcse.api import run
from distcse.errors import InvalidValueError
from distcse.events import Reporter
from distcse.models import CrossEncoder, Encoder
from distcse.models.cpu_kernels import Dropout, use_mkldnn_linear
from distcse.rank_space import rank_space
from distcse.recipe import Recipe, read_recipe, recipe_yaml, with_values
from distcse.text.collate import collate
from tests.backends import run_mutual
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.models import make_masked_lm
from tests.pairs import make_mutual_recipe

SHORTCUTS = {
    "packing": "distcse.models.fast_layers.packed",
    "choice of packing": "distcse.runs.distillation.batch_loader.worth_packing",
    "last layer": "distcse.models.fast_layers.last_layer_at",
    "dropout": "distcse.models.cpu_kernels.dropout",
    "oneDNN layout": "distcse.models.cpu_kernels.onednn_reorder",
}
"""The function that each shortcut calls."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of calls of each shortcut. oneDNN counts as fast, on every CPU."""
    from importlib import import_module

    monkeypatch.setattr("distcse.models.cpu_kernels.is_faster", lambda precision: True)
    found: Counter[str] = Counter()
    for name, path in SHORTCUTS.items():
        module, _, function = path.rpartition(".")
        original = getattr(import_module(module), function)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            found[_name] += 1
            return _original(*args, **kwargs)

        monkeypatch.setattr(path, counted)
    return found


@pytest.mark.parametrize("fast", ["auto", "off"])
def test_off_uses_no_shortcut_in_student_teachers_and_evaluation(
    tmp_path: Path,
    tiny: Callable[..., Path],
    tiny_cross: Path,
    sentences: list[str],
    calls: Counter[str],
    fast: Literal["auto", "off"],
) -> None:
    varied = [sentence * (1 + number % 2) for number, sentence in enumerate(sentences[:200])]
    teachers = [tiny("minilm"), tiny_cross, tiny("roberta")]
    recipe = make_recipe(
        tmp_path,
        tiny("bert"),
        teachers,
        varied,
        f"models.fast={fast}",
        "student.pooling=cls",
        "training.max_steps=3",
        "training.batch_size=8",
        "evaluation.num_heldout=16",
        "teachers.encoders.1.pooling=null",
        "teachers.encoders.2.similarity=rank",
        "teachers.encoders.2.num_references=50",
        f"objective.detection.generator={make_masked_lm(tmp_path / 'generator', tiny('bert'))}",
    )
    outcome = run(recipe)
    assert (outcome.directory / "evaluation.json").is_file()
    assert set(calls) == (set(SHORTCUTS) if fast == "auto" else set())


@pytest.mark.parametrize("fast", ["auto", "off"])
def test_off_uses_no_shortcut_in_groups_and_scorers(
    tmp_path: Path,
    tiny: Callable[..., Path],
    sentences: list[str],
    calls: Counter[str],
    fast: Literal["auto", "off"],
) -> None:
    recipe = make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, f"models.fast={fast}", "mutual.cycles=1")
    run_mutual(recipe, Reporter())
    assert set(calls) == (set(SHORTCUTS) - {"choice of packing"} if fast == "auto" else set())


def test_the_switch_reaches_every_encoder_section_and_other_processes(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, "models.fast=off")
    for copy in (recipe, pickle.loads(pickle.dumps(recipe)), with_values(recipe, {"seed": 1})):
        assert isinstance(copy, Recipe)
        assert not copy.student.is_fast and not any(teacher.is_fast for teacher in copy.teachers.encoders)
    again = with_values(recipe, {"models.fast": "auto"})
    assert isinstance(again, Recipe) and again.student.is_fast and recipe.student.is_fast is False
    assert "is_fast" not in recipe_yaml(recipe) and "fast: 'off'" in recipe_yaml(recipe)
    (tmp_path / "stored.yaml").write_text(recipe_yaml(recipe).replace("'off'", "off"))
    stored = read_recipe(str(tmp_path / "stored.yaml"))
    assert stored.models.fast == "off", "YAML reads off as false"
    with fails_with(InvalidValueError, "models.fast", "'auto' or 'off'"):
        with_values(recipe, {"models.fast": "on"})


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "mpnet"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_vectors_and_gradients_are_equal_without_shortcuts(tiny: Callable[..., Path], kind: str, pooling: Any) -> None:
    vectors, gradients = [], []
    for is_fast in (True, False):
        encoder = Encoder.load(tiny(kind), is_fast=is_fast, pooling=pooling, max_length=16).eval()
        assert encoder.is_fast == is_fast
        tokens = collate([np.arange(5, 5 + length) for length in (3, 12, 7)], 1, with_token_index=True)
        output = encoder(tokens.ids, tokens.mask, tokens.token_index)
        output.pow(2).sum().backward()
        vectors.append(output.detach())
        gradients.append({name: weight.grad for name, weight in encoder.named_parameters() if weight.grad is not None})
    torch.testing.assert_close(vectors[0], vectors[1], atol=2e-6, rtol=1e-5)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-4, rtol=1e-4)


def test_frozen_models_compute_the_same_without_onednn_layout(
    tiny: Callable[..., Path], tiny_cross: Path, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distcse.models.cpu_kernels.is_faster", lambda precision: True)
    texts = sentences[:20]
    pairs = list(zip(texts, texts[::-1], strict=True))
    vectors, scores = [], []
    for is_fast in (True, False):
        encoder = Encoder.load(tiny(), is_fast=is_fast, pooling="mean").eval()
        scorer = CrossEncoder.load(tiny_cross, is_fast=is_fast)
        for model in (encoder, scorer):
            use_mkldnn_linear(model)
            linears = [module for module in model.modules() if type(module) is nn.Linear]
            assert bool(linears) != is_fast
        vectors.append(encoder.encode(texts))
        scores.append(scorer.score(pairs))
    np.testing.assert_allclose(*vectors, atol=2e-6)
    np.testing.assert_allclose(*scores, atol=2e-6)
    references = np.random.default_rng(0).normal(size=(50, 32)).astype(np.float32)
    fast, plain = (rank_space(references, "sort", "cpu", is_fast) for is_fast in (True, False))
    np.testing.assert_allclose(fast.similarities(vectors[0]), plain.similarities(vectors[0]), atol=1e-3)


def test_dropout_layers_are_replaced_only_with_the_switch(tiny: Callable[..., Path]) -> None:
    for is_fast in (True, False):
        encoder = Encoder.load(tiny(), is_fast=is_fast, pooling="cls")
        classifier = CrossEncoder.fresh(tiny(), 16, is_fast=is_fast)
        for model in (encoder, classifier):
            kinds = {type(module) for module in model.modules() if isinstance(module, nn.Dropout)}
            assert kinds == ({Dropout} if is_fast else {nn.Dropout})
