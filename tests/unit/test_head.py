"""Dense modules after pooling: loaded, trained and saved as in sentence-transformers; other modules are refused."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
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
from tests.models import change_json, their_vectors

TEXTS = ["A man is playing a guitar.", "The cat sees nothing at all.", "A child"]
Make = Callable[..., Path]


def write_model(folder: Path, source: Path, *modules: nn.Module) -> Path:
    """Write a folder with sentence-transformers: an encoder of hidden size 32, mean pooling, and the given modules."""
    from sentence_transformers import SentenceTransformer

    Encoder.load(source, pooling="mean", max_length=16).save(folder / "plain")
    model = SentenceTransformer(str(folder / "plain"), device="cpu")
    for module in modules:
        model.append(module)
    model.save(str(folder / "theirs"))
    return folder / "theirs"


@pytest.fixture(scope="module")
def narrow(tiny: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Dense of 8 dimensions in 2_Dense, which no test changes."""
    return write_model(tmp_path_factory.mktemp("narrow"), tiny(), dense(32, 8))


@pytest.fixture
def with_head(narrow: Path, tmp_path: Path) -> Path:
    """Return a copy of a folder with a Dense of 8 dimensions in 2_Dense."""
    return shutil.copytree(narrow, tmp_path / "theirs")


def dense(inputs: int, outputs: int, **settings: Any) -> nn.Module:
    from sentence_transformers.sentence_transformer.modules import Dense

    torch.manual_seed(inputs * outputs)
    module: nn.Module = Dense(inputs, outputs, **settings)
    return module


def norm() -> nn.Module:
    from sentence_transformers.sentence_transformer.modules import Normalize

    module: nn.Module = Normalize()
    return module


def activations() -> list[nn.Module]:
    """One layer for each activation that a folder may name."""
    kinds = (nn.Tanh, nn.ReLU, nn.SiLU, nn.Sigmoid, nn.GELU, nn.Identity)
    return [dense(32, 32, activation_function=kind()) for kind in kinds]


@pytest.mark.parametrize(
    ("kind", "modules", "dimension", "normalize"),
    [
        pytest.param("bert", lambda: [dense(32, 32), norm()], 32, True, id="LaBSE"),
        pytest.param(
            "t5", lambda: [dense(32, 8, bias=False, activation_function=nn.Identity()), norm()], 8, True, id="GTR"
        ),
        pytest.param("bert", lambda: [dense(32, 96), dense(96, 16, bias=False), norm()], 16, True, id="EmbeddingGemma"),
        pytest.param("bert", lambda: [norm(), *activations()], 32, False, id="normalized first"),
        pytest.param(
            "bert", lambda: [dense(32, 8, use_residual=True), dense(8, 8, use_residual=True)], 8, False, id="residual"
        ),
    ],
)
def test_vectors_equal_those_of_sentence_transformers(
    kind: str, modules: Callable[[], list[nn.Module]], dimension: int, normalize: bool, tiny: Make, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, tiny(kind), *modules())
    encoder = Encoder.load(folder)
    assert (encoder.dimension, encoder.normalize) == (dimension, normalize)
    vectors = encoder.encode(TEXTS)
    np.testing.assert_allclose(vectors, their_vectors(folder, TEXTS), atol=1e-5)
    encoder.save(tmp_path / "ours")
    np.testing.assert_allclose(their_vectors(tmp_path / "ours", TEXTS), vectors, atol=1e-5)
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


@pytest.mark.parametrize("kind", ["t5", "modernbert"])
def test_layers_must_include_a_first_one_that_differs(kind: str, tiny: Make) -> None:
    """T5's has the position biases; ModernBERT's has no norm, and the saved folder would be loaded without the norm."""
    with fails_with(EncoderSettingError, "layers must begin with 0", f"layer 0 of {kind}"):
        Encoder.from_section(StudentSection(backbone=str(tiny(kind)), pooling="mean", max_length=8, layers=[1, 2]))


def test_a_head_is_trained_with_its_encoder_and_saved(
    with_head: Path, tiny: Make, tmp_path: Path, sentences: list[str]
) -> None:
    evaluation = "evaluation={dev: none, num_heldout: 0, final_suites: []}"
    overrides = ("student.pooling=null", "student.layers=null", "training.max_steps=3", evaluation)
    recipe = make_recipe(tmp_path, with_head, [tiny("minilm")], sentences[:64], *overrides)
    model = run(recipe, Reporter()).directory.model
    before, saved = Encoder.load(with_head), Encoder.load(model)
    assert saved.dimension == 8
    assert not torch.equal(saved.head[0].linear.weight, before.head[0].linear.weight)  # type: ignore[union-attr, arg-type]
    np.testing.assert_allclose(their_vectors(model, TEXTS), saved.encode(TEXTS), atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "kind", "named"),
    [
        ({"activation_function": "os.system"}, UnsupportedModelError, ["'os.system'", "Identity, Tanh"]),
        ({"activation_function": ["torch.nn.Tanh"]}, UnsupportedModelError, ["is ['torch.nn.Tanh']"]),
        ({"module_input_name": "token_embeddings"}, UnsupportedModelError, ["module_input_name is 'token_embeddings'"]),
        ({"in_features": "32"}, UnsupportedModelError, ["in_features is '32'"]),
        ({"out_features": None}, UnsupportedModelError, ["out_features is missing"]),
        ({"in_features": 16}, ModelFormatError, ["in_features is 16", "32"]),
        ({"out_features": 9}, ModelFormatError, ["config.json", "size mismatch"]),
        ({"use_residual": True}, ModelFormatError, ["residual.weight"]),
    ],
)
def test_other_modules_are_refused(
    changed: dict[str, Any], kind: type[EncoderError], named: list[str], with_head: Path
) -> None:
    change_json(with_head / "2_Dense" / "config.json", **changed)
    with fails_with(kind, "2_Dense", *named):
        Encoder.load(with_head)


def test_missing_pickled_damaged_and_nan_weights_are_refused(with_head: Path, tmp_path: Path) -> None:
    Encoder.load(with_head).save(tmp_path / "ours")
    exported = tmp_path / "ours" / "2_Dense" / "model.safetensors"
    content = bytearray(exported.read_bytes())
    content[-3] ^= 1
    exported.write_bytes(content)
    with fails_with(ModelFormatError, "2_Dense/model.safetensors", "distcse/checksums.json"):
        Encoder.load(tmp_path / "ours")
    file = with_head / "2_Dense" / "model.safetensors"
    save_file({**load_file(file), "linear.bias": torch.full((8,), float("nan"))}, file)
    with fails_with(NotFiniteError, str(with_head), "linear.bias"):
        Encoder.load(with_head)
    file.unlink()
    with fails_with(ModelFormatError, "2_Dense", "model.safetensors"):
        Encoder.load(with_head)
    (file.parent / "pytorch_model.bin").write_bytes(pickle.dumps(print))
    with fails_with(PickledWeightsError, "2_Dense", "no safetensors"):
        Encoder.load(with_head)


def test_a_discriminator_needs_vectors_of_the_hidden_size(narrow: Path) -> None:
    encoder = Encoder.load(narrow)
    with fails_with(UnsupportedModelError, "objective.detection", "8 and 32"):
        build_detector(DetectionSection(generator="unread"), encoder, encoder)
