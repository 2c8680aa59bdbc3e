"""Static models: which folders are read, and what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from distcse.errors import MissingDependencyError, ModelFormatError
from distcse.evaluation import LoadOptions, open_candidate
from distcse.models import StaticEncoder, is_static, static
from tests.failures import fails_with

model2vec = pytest.importorskip("model2vec", reason="model2vec is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = np.array([[9, 9], [1, 0], [0, 1]], dtype=np.float32)
    StaticEncoder(model2vec.StaticModel(vectors, tokenizer, normalize=True, max_length=None)).save(tmp_path / "model")
    return tmp_path / "model"


def change(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


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
    change(folder / "config_sentence_transformers.json", truncate_dim=1)
    assert not is_static(folder)


def test_a_damaged_folder_is_one_error(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:40])
    with fails_with(ModelFormatError, str(folder), "get it again"):
        StaticEncoder.load(folder)
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with fails_with(ModelFormatError, "Git LFS pointer"):
        StaticEncoder.load(folder)


def test_another_version_of_model2vec_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "version", lambda name: "0.4.1")
    with fails_with(MissingDependencyError, "0.4.1 is installed", 'pip install "model2vec[train]>='):
        StaticEncoder.load(folder)
