"""Small models: which folders of static ones are read, and factorized embeddings, which equal full ones of low rank."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from distcse.errors import EncoderSettingError, MissingDependencyError, ModelFormatError, UnsupportedModelError
from distcse.evaluation import LoadOptions, open_candidate
from distcse.models import Encoder, StaticEncoder, is_static, static
from distcse.models.cpu_kernels import Dropout
from distcse.models.student import factorize_embeddings
from distcse.recipe import StudentSection
from tests.failures import fails_with
from tests.models import change_json, their_vectors

model2vec = pytest.importorskip("model2vec", reason="model2vec is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = np.array([[9, 9], [1, 0], [0, 1]], dtype=np.float32)
    StaticEncoder(model2vec.StaticModel(vectors, tokenizer, normalize=True, max_length=None)).save(tmp_path / "model")
    return tmp_path / "model"


def test_a_static_model_averages_its_known_tokens(folder: Path) -> None:
    assert is_static(folder)
    encoded = StaticEncoder.load(folder).encode(["a", "a b c", "c"])
    np.testing.assert_allclose(encoded, [[1, 0], [0.5**0.5, 0.5**0.5], [0, 0]], atol=1e-6)
    info = open_candidate("s", str(folder), LoadOptions()).info
    assert (info.kind, info.dimensions, info.max_length, info.parameters, info.size_bytes) == ("static", 2, 0, 6, 24)


def test_folders_with_further_modules_are_no_static_models(folder: Path) -> None:
    """model2vec would leave the module out."""
    modules = folder / "modules.json"
    written = json.loads(modules.read_text())
    modules.write_text(json.dumps([*written, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]))
    assert not is_static(folder)
    modules.write_text(json.dumps(written))
    (folder / "config_sentence_transformers.json").write_text("{}")
    assert is_static(folder)
    change_json(folder / "config_sentence_transformers.json", truncate_dim=1)
    assert not is_static(folder)


def test_a_damaged_folder_is_one_error(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:40])
    with fails_with(ModelFormatError, str(folder), "get it again"):
        StaticEncoder.load(folder)


def test_another_version_of_model2vec_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "version", lambda name: "0.4.1")
    with fails_with(MissingDependencyError, "0.4.1 is installed", 'pip install "model2vec[train]>='):
        StaticEncoder.load(folder)


@pytest.mark.parametrize("rows", [312, 302])
def test_a_token_has_its_own_row_where_ids_have_gaps(rows: int, tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Also where the last tokens have no embeddings, which get no vectors."""
    from transformers import AutoModel

    source = shutil.copytree(tiny("bert"), tmp_path / "source")
    file = source / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    size, last = len(vocabulary), max(vocabulary, key=lambda token: vocabulary[token])
    vocabulary[last] += 7
    content["added_tokens"].append({**content["added_tokens"][0], "id": size + 7, "content": "extra", "special": False})
    file.write_text(json.dumps(content))
    backbone = AutoModel.from_pretrained(source)
    backbone.resize_token_embeddings(rows)
    backbone.save_pretrained(source)
    encoder = Encoder.load(source, pooling="mean", max_length=16).eval()
    ids = encoder.tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
    assert max(ids.values()) + 1 > len(ids)
    StaticEncoder.of_tokens(encoder).save(tmp_path / "static")
    words = [word for word in ("guitar", "neighbour", "extra") if ids.get(word, rows) < rows]
    assert words
    loaded = StaticEncoder.load(tmp_path / "static")
    expected = encoder.encode(words, normalize=True)
    np.testing.assert_allclose(loaded.encode(words), expected, atol=1e-5)
    np.testing.assert_allclose(their_vectors(tmp_path / "static", words), expected, atol=1e-5)


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
