"""Dense modules after pooling: loaded, trained and saved as in sentence-transformers; other modules are refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from distcse.errors import (
    EncoderError,
    EncoderSettingError,
    ModelFormatError,
    NotFiniteError,
    PickledWeightsError,
    UnsupportedModelError,
)
from distcse.events import Reporter
from distcse.models import Encoder
from distcse.models.detection import build_detector
from distcse.models.pooling import Normalize
from distcse.planning.sizes import read_shape
from distcse.recipe import DetectionSection, EncoderSection, StudentSection
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.models import their_vectors

TEXTS = ["A man is playing a guitar.", "The cat sees nothing at all.", "A child"]
Make = Callable[..., Path]


@pytest.fixture
def with_head(tiny: Make, tmp_path: Path) -> Make:
    """Writes a folder with sentence-transformers: an encoder of hidden size 32, mean pooling, and the given modules."""

    def make(*modules: nn.Module, kind: str = "bert") -> Path:
        from sentence_transformers import SentenceTransformer

        Encoder.load(tiny(kind), pooling="mean", max_length=16).save(tmp_path / "plain")
        model = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
        for module in modules:
            model.append(module)
        model.save(str(tmp_path / "theirs"))
        return tmp_path / "theirs"

    return make


def dense(inputs: int, outputs: int, **settings: Any) -> nn.Module:
    from sentence_transformers.sentence_transformer.modules import Dense

    torch.manual_seed(inputs * outputs)
    module: nn.Module = Dense(inputs, outputs, **settings)
    return module


def norm() -> nn.Module:
    from sentence_transformers.sentence_transformer.modules import Normalize

    module: nn.Module = Normalize()
    return module


def theirs(folder: Path) -> np.ndarray:
    return their_vectors(folder, TEXTS)


@pytest.mark.parametrize(
    ("modules", "dimension", "normalize"),
    [
        pytest.param([lambda: dense(32, 32), norm], 32, True, id="LaBSE"),
        pytest.param([lambda: dense(32, 8, bias=False, activation_function=nn.Identity()), norm], 8, True, id="GTR"),
        pytest.param([lambda: dense(32, 96), lambda: dense(96, 16, bias=False), norm], 16, True, id="EmbeddingGemma"),
        pytest.param([norm, lambda: dense(32, 8, activation_function=nn.GELU())], 8, False, id="narrowed afterwards"),
        pytest.param(
            [lambda: dense(32, 8, use_residual=True), lambda: dense(8, 8, use_residual=True)], 8, False, id="residual"
        ),
        *(
            pytest.param([partial(dense, 32, 8, activation_function=kind())], 8, False, id=kind.__name__)
            for kind in (nn.Tanh, nn.ReLU, nn.SiLU, nn.Sigmoid)
        ),
    ],
)
def test_vectors_equal_those_of_sentence_transformers(
    modules: list[Callable[[], nn.Module]], dimension: int, normalize: bool, with_head: Make, tmp_path: Path
) -> None:
    folder = with_head(*(module() for module in modules))
    encoder = Encoder.load(folder)
    assert (encoder.dimension, encoder.normalize) == (dimension, normalize)
    vectors = encoder.encode(TEXTS)
    np.testing.assert_allclose(vectors, theirs(folder), atol=1e-5)
    encoder.save(tmp_path / "ours")
    np.testing.assert_allclose(theirs(tmp_path / "ours"), vectors, atol=1e-5)
    np.testing.assert_allclose(Encoder.load(tmp_path / "ours").encode(TEXTS), vectors, atol=1e-6)
    shape = read_shape(EncoderSection(backbone=str(folder)))
    assert shape.dimension == dimension
    assert shape.parameters + shape.frozen_parameters == sum(weight.numel() for weight in encoder.parameters())


def test_a_normalized_zero_vector_stays_zero_without_gradient() -> None:
    vectors = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    vectors[1] = 0.0
    weights = torch.arange(8.0)
    found, expected = vectors.clone().requires_grad_(), vectors.double().requires_grad_()
    normalized = Normalize()(found)
    (normalized @ weights).sum().backward()
    (nn.functional.normalize(expected[[0, 2]], dim=1) @ weights.double()).sum().backward()
    assert found.grad is not None and expected.grad is not None
    assert not normalized[1].any() and not found.grad[1].any()
    torch.testing.assert_close(found.grad[[0, 2]].double(), expected.grad[[0, 2]], atol=1e-5, rtol=0)


def test_the_encoder_of_t5_is_loaded(with_head: Make) -> None:
    folder = with_head(dense(32, 8, bias=False, activation_function=nn.Identity()), norm(), kind="t5")
    np.testing.assert_allclose(Encoder.load(folder).encode(TEXTS), theirs(folder), atol=1e-5)


def test_layers_of_t5_must_include_the_first_with_its_position_biases(tiny: Make) -> None:
    with fails_with(EncoderSettingError, "layers must begin with 0", "layer 0 of t5"):
        Encoder.from_section(StudentSection(backbone=str(tiny("t5")), pooling="mean", max_length=8, layers=[1, 2]))


def test_layers_of_modernbert_must_include_the_first_without_a_norm(tiny: Make) -> None:
    """Otherwise, the saved folder would be loaded without the norm of its first layer."""
    with fails_with(EncoderSettingError, "layers must begin with 0", "layer 0 of modernbert"):
        Encoder.from_section(StudentSection(backbone=str(tiny("modernbert")), pooling="mean", layers=[1, 2]))


def test_a_head_is_trained_with_its_encoder_and_saved(
    with_head: Make, tiny: Make, tmp_path: Path, sentences: list[str]
) -> None:
    student = with_head(dense(32, 16))
    recipe = make_recipe(tmp_path, student, [tiny("minilm")], sentences, "student.pooling=null", "student.layers=null")
    before = Encoder.load(student)
    model = run(recipe, Reporter()).directory.model
    saved = Encoder.load(model)
    assert saved.dimension == 16
    assert not torch.equal(saved.head[0].linear.weight, before.head[0].linear.weight)  # type: ignore[union-attr, arg-type]
    np.testing.assert_allclose(theirs(model), saved.encode(TEXTS), atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "kind", "named"),
    [
        ({"activation_function": "os.system"}, UnsupportedModelError, ["'os.system'", "Identity, Tanh"]),
        (
            {"activation_function": ["torch.nn.Tanh"]},
            UnsupportedModelError,
            ["activation_function is ['torch.nn.Tanh']"],
        ),
        ({"module_input_name": "token_embeddings"}, UnsupportedModelError, ["module_input_name is 'token_embeddings'"]),
        ({"in_features": "32"}, UnsupportedModelError, ["in_features is '32'"]),
        ({"out_features": None}, UnsupportedModelError, ["out_features is missing"]),
        ({"in_features": 16}, ModelFormatError, ["in_features is 16", "32"]),
        ({"out_features": 9}, ModelFormatError, ["config.json", "size mismatch"]),
        ({"use_residual": True}, ModelFormatError, ["residual.weight"]),
    ],
)
def test_other_modules_are_refused(
    changed: dict[str, Any], kind: type[EncoderError], named: list[str], with_head: Make
) -> None:
    folder = with_head(dense(32, 8))
    file = folder / "2_Dense" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with fails_with(kind, "2_Dense", *named):
        Encoder.load(folder)


def test_missing_pickled_and_nan_weights_are_refused(with_head: Make) -> None:
    file = with_head(dense(32, 8)) / "2_Dense" / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "linear.bias": torch.full((8,), float("nan"))}, file)
    with fails_with(NotFiniteError, str(file.parent.parent), "linear.bias"):
        Encoder.load(file.parent.parent)
    file.unlink()
    with fails_with(ModelFormatError, "2_Dense", "model.safetensors"):
        Encoder.load(file.parent.parent)
    (file.parent / "pytorch_model.bin").write_bytes(pickle.dumps(print))
    with fails_with(PickledWeightsError, "2_Dense", "no safetensors"):
        Encoder.load(file.parent.parent)


def test_a_head_damaged_after_its_export_is_refused(with_head: Make, tmp_path: Path) -> None:
    Encoder.load(with_head(dense(32, 8))).save(tmp_path / "ours")
    file = tmp_path / "ours" / "2_Dense" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with fails_with(ModelFormatError, "2_Dense/model.safetensors", "distcse/checksums.json"):
        Encoder.load(tmp_path / "ours")


def test_a_discriminator_needs_vectors_of_the_hidden_size(with_head: Make) -> None:
    narrow = Encoder.load(with_head(dense(32, 8)))
    with fails_with(UnsupportedModelError, "objective.detection", "8 and 32"):
        build_detector(DetectionSection(generator="unread"), narrow, narrow)
