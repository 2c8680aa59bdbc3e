"""`layers: auto`: selection of the layers that agree best with the teachers before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel

from distcse.errors import EncoderSettingError, InvalidValueError, UnsupportedModelError
from distcse.evaluation import agreement
from distcse.events import Event, Reporter, StageProgress
from distcse.models import Encoder, only_layers
from distcse.models.student import keep_layers
from distcse.recipe import EncoderSection, Recipe, StudentSection
from distcse.runs.distillation.layer_selection import best_layers
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_recipe

MakeRecipe = Callable[..., Recipe]
AUTO = (
    "student.layers=auto",
    "student.num_layers=2",
    "training.max_steps=1",
    "evaluation.dev=none",
    "evaluation.final_suites=[]",
)


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    """The teacher is the backbone with all its layers."""
    return lambda *overrides: make_recipe(tmp_path, tiny("bert"), [tiny("bert")], sentences, *overrides)


def test_the_selected_layers_agree_best_and_are_stored(recipe_with: MakeRecipe) -> None:
    events: list[Event] = []
    result = run(recipe_with(*AUTO), Reporter(events.append))
    layers = result.recipe.student.layers
    assert isinstance(layers, list) and len(layers) == 2
    stored = yaml.safe_load((result.directory.path / "recipe.yaml").read_text())["student"]
    assert stored["layers"] == layers and stored["num_layers"] is None
    texts = Path(str(result.recipe.corpus.path)).read_text().splitlines()[:512]
    full = Encoder.load(result.recipe.student.backbone, pooling="mean", max_length=16)
    teacher = Encoder.from_section(result.recipe.teachers.encoders[0]).encode(texts, normalize=True)
    scores = {}
    for subset in combinations(range(3), 2):
        with only_layers(full.backbone, subset):
            scores[subset] = agreement(full.encode(texts, normalize=True), teacher @ teacher.T)
    assert max(scores, key=lambda subset: scores[subset]) == tuple(layers)
    progress = [event for event in events if isinstance(event, StageProgress) and event.name == "layers"]
    assert [event.done for event in progress if not event.finished] == [1, 2, 3] and "best of 3" in progress[-1].note
    later: list[Event] = []
    assert run(recipe_with(*AUTO), Reporter(later.append)).recipe.student.layers == layers
    (cached,) = [event for event in later if isinstance(event, StageProgress) and event.name == "layers"]
    assert cached.finished and cached.note.startswith(f"{layers}: ")


def test_only_layers_equals_the_shallow_model_and_restores_the_encoder(tiny: Callable[..., Path]) -> None:
    section = EncoderSection(backbone=str(tiny("bert")), pooling="mean")
    encoder = Encoder.from_section(section)
    before = encoder.encode(["A cat.", "Two dogs run."])
    cut = Encoder.from_section(StudentSection(backbone=section.backbone, pooling="mean", layers=[0, 2]))
    with only_layers(encoder.backbone, [0, 2]):
        np.testing.assert_allclose(encoder.encode(["A cat."]), cut.encode(["A cat."]), atol=1e-6)
    np.testing.assert_array_equal(encoder.encode(["A cat.", "Two dogs run."]), before)
    with pytest.raises(RuntimeError, match="halfway"), only_layers(encoder.backbone, [1]):
        raise RuntimeError("halfway")
    assert torch.equal(torch.from_numpy(encoder.encode(["A cat.", "Two dogs run."])), torch.from_numpy(before))


def test_many_combinations_are_searched_greedily() -> None:
    scored: list[tuple[int, ...]] = []

    def score(layers: object) -> float:
        assert isinstance(layers, tuple)
        scored.append(layers)
        return float(sum(layers))

    found = best_layers(12, 3, score)
    assert max(found, key=lambda layers: found[layers]) == (9, 10, 11) and len(scored) == sum(range(4, 13))
    assert len(best_layers(6, 3, score)) == 20


def test_invalid_layers_are_refused(recipe_with: MakeRecipe) -> None:
    for override in ("student.layers=auto", "student.num_layers=2"):
        with fails_with(InvalidValueError, "layers: auto", "num_layers"):
            recipe_with(override)
    with fails_with(EncoderSettingError, "student.num_layers", "9", "3 layers"):
        run(recipe_with("student.layers=auto", "student.num_layers=9"), Reporter())
    backbone = recipe_with().student.backbone
    with fails_with(EncoderSettingError, "layers"):
        Encoder.from_section(StudentSection(backbone=backbone, pooling="mean", layers="auto", num_layers=2))


@pytest.mark.parametrize(("depth", "count"), [(3, 2), (12, 3)])
def test_a_required_first_layer_is_in_every_selection(depth: int, count: int) -> None:
    tried: list[Sequence[int]] = []
    found = best_layers(depth, count, lambda layers: (tried.append(layers), float(sum(layers)))[1], with_first=True)
    assert all(layers[0] == 0 for layers in tried)
    assert max(found, key=lambda layers: found[layers]) == (0, *range(depth - count + 1, depth))


def test_layers_of_t5_are_selected_with_its_first(
    tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
    recipe = make_recipe(tmp_path, tiny("t5"), [tiny("minilm")], sentences, *AUTO)
    selected = run(recipe, Reporter()).recipe.student.layers
    assert selected in ([0, 1], [0, 2])


@pytest.mark.skipif("hy_v4" not in CONFIG_MAPPING, reason="this transformers has no HYV4")
def test_layers_with_which_the_saved_model_would_lack_weights_are_refused() -> None:
    """Its third layer has no indexer, and would be the second one, which has."""
    sizes = {
        **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
        **{"pad_token_id": 0, "vocab_size": 300},
    }  # fmt: skip
    with torch.device("meta"):
        backbone = AutoModel.from_config(AutoConfig.for_model("hy_v4", **sizes))
    with fails_with(UnsupportedModelError, "indexer", "depends on all 3 layers"):
        keep_layers(backbone, [0, 2])
