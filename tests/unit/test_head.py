"""Linear maps after pooling: read, learned and written as sentence-transformers does it, and nothing else taken for one."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from distcse.detection import build_detector
from distcse.errors import EncoderError
from distcse.events import Reporter
from distcse.experiments.distillation.run import run
from distcse.models import Encoder
from distcse.planning.shapes import read_shape
from distcse.recipe import DetectionSection, EncoderSection, StudentSection
from tests.jobs import make_recipe
from tests.models import their_vectors

TEXTS = ["A man is playing a guitar.", "The cat sees nothing at all.", "A child"]
Make = Callable[..., Path]


@pytest.fixture
def with_head(tiny: Make, tmp_path: Path) -> Make:
    """Makes a folder as sentence-transformers writes it: an encoder 32 wide, mean pooling and these modules."""

    def make(*modules: nn.Module, kind: str = "bert") -> Path:
        from sentence_transformers import SentenceTransformer

        Encoder.load(tiny(kind), pooling="mean", max_length=16).save(tmp_path / "plain")
        model = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
        for module in modules:
            model.append(module)
        model.save(str(tmp_path / "theirs"))
        return tmp_path / "theirs"

    return make


def dense(inputs: int, outputs: int, **how: Any) -> nn.Module:
    from sentence_transformers.sentence_transformer.modules import Dense

    torch.manual_seed(inputs * outputs)
    module: nn.Module = Dense(inputs, outputs, **how)
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
    ],
)
def test_vectors_are_the_models_own(
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


def test_the_encoder_half_of_t5_is_a_teacher(with_head: Make) -> None:
    folder = with_head(dense(32, 8, bias=False, activation_function=nn.Identity()), norm(), kind="t5")
    np.testing.assert_allclose(Encoder.load(folder).encode(TEXTS), theirs(folder), atol=1e-5)


def test_layers_of_t5_keep_the_one_that_knows_positions(tiny: Make) -> None:
    with pytest.raises(EncoderError, match="layers must begin with 0: layer 0 of t5 has other weights than the rest"):
        Encoder.from_section(StudentSection(backbone=str(tiny("t5")), pooling="mean", max_length=8, layers=[1, 2]))


def test_layers_of_modernbert_keep_the_one_without_a_norm(tiny: Make) -> None:
    """A saved folder would be read without the norm of whichever layer is first."""
    with pytest.raises(EncoderError, match="layer 0 of modernbert has other weights than the rest"):
        Encoder.from_section(StudentSection(backbone=str(tiny("modernbert")), pooling="mean", layers=[1, 2]))


def test_a_head_learns_with_its_encoder_and_is_saved(
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
    ("changed", "told"),
    [
        ({"activation_function": "os.system"}, r"activation 'os\.system' is not supported; supported: Identity, Tanh"),
        ({"activation_function": ["torch.nn.modules.activation.Tanh"]}, "is not supported"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'; distcse maps sentence"),
        ({"in_features": 16}, "takes 16 numbers, and is given 32"),
        ({"in_features": "32"}, "in_features and out_features are '32' and 8, no widths"),
        ({"out_features": 9}, r"is not what its config\.json says: .*size mismatch"),
        ({"use_residual": True}, r"lacks residual\.weight; it would be random"),
    ],
)
def test_other_maps_are_refused(changed: dict[str, Any], told: str, with_head: Make) -> None:
    folder = with_head(dense(32, 8))
    file = folder / "2_Dense" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with pytest.raises(EncoderError, match=told):
        Encoder.load(folder)


def test_weights_that_are_not_there_or_no_numbers_are_refused(with_head: Make) -> None:
    file = with_head(dense(32, 8)) / "2_Dense" / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "linear.bias": torch.full((8,), float("nan"))}, file)
    with pytest.raises(EncoderError, match="holds NaN or infinity"):
        Encoder.load(file.parent.parent)
    file.unlink()
    (file.parent / "pytorch_model.bin").write_bytes(pickle.dumps(print))
    with pytest.raises(EncoderError, match=r"2_Dense holds no model\.safetensors, and distcse opens no pickles"):
        Encoder.load(file.parent.parent)


def test_a_map_before_pooling_is_refused(with_head: Make) -> None:
    file = with_head(dense(32, 8)) / "modules.json"
    transformer, pooling, map_ = json.loads(file.read_text())
    file.write_text(json.dumps([transformer, map_, pooling]))
    with pytest.raises(EncoderError, match="has a Dense module"):
        Encoder.load(file.parent)


def test_a_map_that_was_damaged_after_its_export_is_refused(with_head: Make, tmp_path: Path) -> None:
    Encoder.load(with_head(dense(32, 8))).save(tmp_path / "ours")
    file = tmp_path / "ours" / "2_Dense" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(EncoderError, match=r"2_Dense/model\.safetensors is not what was written: its checksum differs"):
        Encoder.load(tmp_path / "ours")


def test_a_discriminator_wants_vectors_as_wide_as_its_words(with_head: Make) -> None:
    narrow = Encoder.load(with_head(dense(32, 8)))
    with pytest.raises(EncoderError, match="8 and 32 numbers; take a student without a Dense module"):
        build_detector(DetectionSection(operation="deletion"), narrow, narrow)
