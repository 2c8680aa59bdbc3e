"""Encoders by hand, static and factorized ones too: pooling, views, what is saved, fingerprints, and errors of folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from distcse.errors import (
    ArgumentError,
    EncoderError,
    EncoderSettingError,
    MissingDependencyError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from distcse.evaluation import LoadOptions, open_candidate
from distcse.models import (
    Encoder,
    StaticEncoder,
    build_projection,
    is_static,
    model_fingerprint,
    pool,
    resolve_model,
    static,
)
from distcse.recipe import Pooling, StudentSection
from distcse.runs.distillation.student_model import Batch, StudentModel, build_encoder
from distcse.text.collate import Tokens
from tests.failures import fails_with
from tests.models import assert_saved_alike, change_json, their_vectors

TEXTS = ["A man is playing a guitar.", "The cat sees nothing at all.", "A child", "Our teacher reads about the news."]


def same(one: np.ndarray, other: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(one, other, atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def encoder(tiny: Callable[..., Path]) -> Encoder:
    """Return an encoder that no test changes."""
    return Encoder.load(tiny("bert"), pooling="mean", max_length=12)


def test_a_saved_folder_has_the_legacy_layout(tiny: Callable[..., Path], tmp_path: Path) -> None:
    Encoder.load(tiny("bert"), pooling="cls", max_length=12, prompt="query: ").save(tmp_path / "model")
    folder = tmp_path / "model"

    def read(name: str) -> Any:
        return json.loads((folder / name).read_text())

    types = [module["type"].removeprefix("sentence_transformers.models.") for module in read("modules.json")]
    assert types == ["Transformer", "Pooling"]
    others = ("mean_tokens", "max_tokens", "lasttoken", "mean_sqrt_len_tokens", "weightedmean_tokens")
    assert read("1_Pooling/config.json") == {
        "word_embedding_dimension": 32,
        "pooling_mode_cls_token": True,
        **{f"pooling_mode_{other}": False for other in others},
        "include_prompt": True,
    }
    assert (
        read("sentence_bert_config.json")["max_seq_length"] == read("tokenizer_config.json")["model_max_length"] == 12
    )
    assert (folder / "model.safetensors").exists() and not list(folder.rglob("*.bin"))


def test_a_folder_that_lowercases_is_followed(tiny: Callable[..., Path], tmp_path: Path) -> None:
    Encoder.load(tiny("roberta"), pooling="mean", max_length=8).save(tmp_path / "model")
    change_json(tmp_path / "model" / "sentence_bert_config.json", do_lower_case=True)
    encoder = Encoder.load(tmp_path / "model")  # RoBERTa's own tokenizer does not lowercase
    assert encoder.token_ids(["A Man"]) == encoder.token_ids(["a man"])
    same(encoder.encode(TEXTS), their_vectors(tmp_path / "model", TEXTS))
    assert_saved_alike(encoder, tmp_path / "saved", TEXTS)


def test_a_real_teacher_has_the_vectors_of_sentence_transformers(minilm: str) -> None:
    encoder = Encoder.load(minilm)
    assert (encoder.pooling, encoder.max_length, encoder.normalize, encoder.dimension) == ("mean", 256, True, 384)
    vectors = encoder.encode(TEXTS)
    same(vectors, their_vectors(resolve_model(minilm), TEXTS))
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-6)
    assert encoder.encode(TEXTS, precision="bf16", normalize=True).dtype == np.float32


def test_order_and_padding_do_not_matter(tiny: Callable[..., Path], sentences: list[str]) -> None:
    encoder = Encoder.load(tiny("roberta"), pooling="mean", max_length=20)
    assert not encoder.training or encoder.eval()
    encoder.train()
    done: list[int] = []
    vectors = encoder.encode(sentences[:60], batch_tokens=64, on_progress=done.append)
    assert encoder.training and done[-1] == 60
    same(vectors, encoder.encode(sentences[:60], batch_tokens=10_000), 2e-6)
    same(vectors[::-1], encoder.encode(sentences[:60][::-1]), 2e-6)
    same(np.concatenate([encoder.encode([text]) for text in sentences[:5]]), vectors[:5], 2e-6)
    assert encoder.encode([]).shape == (0, 32)


def test_padding_on_the_left_is_not_pooled() -> None:
    states, left = torch.randn(2, 3, 4), torch.tensor([[1, 1, 1], [0, 1, 1]])
    expected = {"cls": states[1, 1], "last_token": states[1, 2], "mean": states[1, 1:].mean(dim=0)}
    expected["max"] = states[1, 1:].amax(dim=0)
    for kind, vector in expected.items():
        torch.testing.assert_close(pool(cast(Pooling, kind), states, left)[1], vector)
    assert pool("mean", states.bfloat16(), left).dtype == torch.float32


def test_views_depend_on_their_dropout_seed(tiny: Callable[..., Path]) -> None:
    model = build_encoder(StudentSection(backbone=str(tiny("bert")), pooling="cls", projection="tanh_mlp")).train()
    tokens = Tokens(ids := torch.tensor([[2, 7, 8, 3], [2, 9, 10, 3]]), torch.ones_like(ids))
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    z1, z2, _ = model(Batch([(tokens, 1)]))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert z1.shape == z2.shape == (2, 32) and not torch.allclose(z1, z2)
    again, other = (model(Batch([(tokens, seed)])).z1 for seed in (1, 2))
    assert torch.equal(again, z1) and not torch.allclose(other, z1)
    both = model(Batch([(tokens, 1), (tokens, 2)])).z1
    torch.testing.assert_close(both, torch.cat([z1, other]))


def test_without_dropout_one_pass_computes_both_views(tiny: Callable[..., Path]) -> None:
    section = StudentSection(backbone=str(tiny("bert")), pooling="mean", dropout=0.0, projection="none")
    model = build_encoder(section).train()
    ids = torch.tensor([[2, 7, 8, 3], [2, 9, 10, 3]])
    passes: list[int] = []
    model.encoder.backbone.register_forward_hook(lambda module, inputs, output: passes.append(1))
    z1, z2, _ = model(Batch([(Tokens(ids, torch.ones_like(ids)), 1)]))
    assert torch.equal(z1, z2) and len(passes) == 1
    twice = StudentModel(model.encoder, nn.Identity()).eval()
    torch.testing.assert_close(z1, twice.encoder(ids, torch.ones_like(ids)))


def test_projection_oracle(oracles: dict[str, Any]) -> None:
    case = oracles["diffcse_projection_mlp"]
    head = build_projection("batch_norm_mlp", 2).double()
    linears = [module for module in head.modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        linears[0].weight.copy_(torch.tensor(case["inputs"]["w1"]))
        linears[1].weight.copy_(torch.tensor(case["inputs"]["w2"]))
    rows = torch.tensor(case["inputs"]["x"], dtype=torch.float64)
    tolerance = {"atol": 2e-6, "rtol": 0.0}
    torch.testing.assert_close(head.train()(rows), torch.tensor(case["expected"]["train_out"]).double(), **tolerance)
    expected = torch.tensor(case["expected"]["eval_after_one_step"]).double()
    torch.testing.assert_close(head.eval()(rows), expected, **tolerance)


@pytest.mark.parametrize(
    ("kind", "settings", "error", "named"),
    [
        ("bert", {"pooling": None}, EncoderSettingError, ["pooling: cls, mean"]),
        ("bert", {"max_length": 67}, EncoderSettingError, ["max_length is 67", "at most 66"]),
        ("roberta", {"max_length": 65}, EncoderSettingError, ["max_length is 65", "at most 64"]),
        ("bert", {"layers": [0, 3]}, EncoderSettingError, ["layers", "3 layers", "0 to 2"]),
        # T5's first layer has the position biases; ModernBERT's has no norm, which a reader of the folder would add.
        *(
            (kind, {"layers": [1, 2]}, EncoderSettingError, ["layers must begin with 0", f"layer 0 of {kind}"])
            for kind in ("t5", "modernbert")
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_errors(
    kind: str, settings: dict[str, Any], error: type[EncoderError], named: list[str], tiny: Callable[..., Path]
) -> None:
    with fails_with(error, *named):
        Encoder.from_section(
            StudentSection.model_validate({"backbone": str(tiny(kind)), "pooling": "mean", "max_length": 8, **settings})
        )


@pytest.mark.parametrize(("kind", "positions"), [("bert", 66), ("roberta", 64)])
def test_the_longest_text_is_by_default_the_backbones(kind: str, positions: int, tiny: Callable[..., Path]) -> None:
    assert Encoder.load(tiny(kind), pooling="mean").max_length == positions


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("./nowhere", str(Path("nowhere").absolute())),
        ("package:no_such_package/x", "pip install no_such_package"),
        ("package:numpy/no_folder", "'no_folder'"),
        ("nobody/no-such-model", "HF_HUB_OFFLINE"),
    ],
)
def test_missing_models_are_errors(name: str, named: str) -> None:
    with fails_with(ModelNotFoundError, named):
        resolve_model(name)


def test_the_fingerprint_depends_on_code_that_a_config_names_and_on_no_card(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    Encoder.load(tiny("bert"), pooling="mean", max_length=8).save(folder)
    first, code = model_fingerprint(folder), folder / "modeling.py"
    (folder / "README.md").write_text("a card")

    def fingerprints() -> tuple[str, str]:
        return model_fingerprint(folder), model_fingerprint(folder, trust_remote_code=True)

    for config in (folder / "config.json", folder / "tokenizer_config.json"):
        code.write_text("one = 1")
        assert fingerprints() == (first, first), "the config does not refer to the code"
        before = config.read_text()
        change_json(config, auto_map={"A": "modeling.M"})
        named = fingerprints()
        assert len({first, *named}) == 3
        code.write_text("one = 2")
        assert fingerprints()[0] == named[0] and fingerprints()[1] != named[1]
        config.write_text(before)


def test_a_failed_save_leaves_the_old_model(tiny: Callable[..., Path], tmp_path: Path) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="mean", max_length=8)
    encoder.save(tmp_path / "model")
    before = encoder.encode(TEXTS)
    encoder.pooling = "nonsense"  # type: ignore[assignment]
    encoder.backbone.embeddings.word_embeddings.weight.data.zero_()  # type: ignore[operator, union-attr]
    encoder.tokenizer = None
    with pytest.raises(AttributeError):
        encoder.save(tmp_path / "model")
    same(Encoder.load(tmp_path / "model").encode(TEXTS), before)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_template_is_pooled_at_its_mask_token(
    tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    template = 'A child reads about "{sentence}" is [MASK].'
    encoder = Encoder.load(tiny("bert"), pooling="mask", prompt=template, max_length=40)
    texts = [*sentences[:5], " ".join(sentences[:8])]
    ids = encoder.token_ids(texts)
    mask_id, tail = encoder.tokenizer.mask_token_id, ids[0][-4:]
    assert all(len(row) <= 40 and row.count(mask_id) == 1 and row[-4:] == tail for row in ids)  # also the truncated one
    assert len(ids[-1]) >= 38
    vectors = encoder.encode(texts)
    with torch.no_grad():
        hidden = encoder.eval().backbone(torch.tensor([ids[0]])).last_hidden_state[0]
    torch.testing.assert_close(torch.from_numpy(vectors[0]), hidden[ids[0].index(mask_id)], atol=1e-5, rtol=1e-4)
    with fails_with(UnsupportedModelError, "prompt", "pooling mask"):
        encoder.save(tmp_path / "model")
    with fails_with(EncoderSettingError, "pooling mask", "[MASK]", "prompt is ''"):
        Encoder.load(tiny("bert"), pooling="mask")
    with fails_with(EncoderSettingError, repr(template), "8 tokens", "max_length"):
        Encoder.load(tiny("bert"), pooling="mask", prompt=template, max_length=8).encode(["A man."])
    with pytest.raises(ValueError, match="are for teachers"):
        StudentSection(backbone="x", pooling="mask")


def test_texts_come_in_any_container(encoder: Encoder) -> None:
    import pandas
    import pyarrow

    containers: list[Callable[[list[str]], Any]] = [
        *(tuple, iter, np.array, lambda texts: np.array(texts, object), lambda texts: dict.fromkeys(texts).keys()),
        lambda texts: pandas.Series(texts, index=range(7, 7 + len(texts)), dtype=object),
        lambda texts: pandas.Series(texts, dtype="string"),
        lambda texts: pandas.Series(texts, dtype="category"),
        pandas.Index,
        lambda texts: pyarrow.array(texts, pyarrow.string()),
        lambda texts: pyarrow.array(texts, pyarrow.string_view()),
        lambda texts: pyarrow.chunked_array([texts], pyarrow.string()),
    ]
    expected = encoder.encode(TEXTS)
    for container in containers:
        same(encoder.encode(container(TEXTS)), expected)
        assert encoder.encode(container([])).shape == (0, encoder.dimension)
    for text in (TEXTS[0], np.str_(TEXTS[0])):
        same(encoder.encode(text), expected[0])


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        (["a", "b", 3], ["texts[2]", "3", "int"]),
        ([["a"]], ["texts[0]", "list"]),
        ((text for text in ["a", None]), ["texts[1]", "None"]),
        (np.array([["a", "b"]]), ["texts[0]", "ndarray"]),
        (["a", "b \ud83d"], ["texts[1]", r"'\ud83d'", "surrogate"]),
        ("\ud83d", ["texts[0]", "surrogate"]),
        *((texts, [type(texts).__name__]) for texts in (None, b"a", {"text": "a"}, {"a"}, np.array("a"))),
        *((texts, [type(texts).__name__]) for texts in (memoryview(b"a"), torch.tensor(1.0))),
    ],
)
def test_what_is_no_text_is_refused_with_its_place(texts: Any, named: list[str], encoder: Encoder) -> None:
    with fails_with(ArgumentError, *named):
        encoder.encode(texts)


def test_groups_tables_and_other_librarys_arguments_are_refused(encoder: Encoder) -> None:
    """sentence-transformers has `precision="int8"`, which quantizes the vectors."""
    import pandas
    import pyarrow

    with fails_with(ArgumentError, "texts[1]"):
        list(encoder.encode_each([["a"], ["b", None]]))  # type: ignore[list-item]
    frame = pandas.DataFrame({"id": [1], "text": ["a"]})
    for table in (frame, pyarrow.Table.from_pandas(frame)):
        with fails_with(ArgumentError, f"found {type(table).__name__}", "list of str"):
            encoder.encode(table)
    with fails_with(EncoderSettingError, "precision is 'int8'", "fp32, bf16, fp16"):
        encoder.encode(TEXTS, precision="int8")
    with fails_with(EncoderSettingError, "['query']"):
        encoder.encode(TEXTS, prompt_name=cast(Any, ["query"]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model2vec = pytest.importorskip("model2vec", reason="model2vec is not installed")
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
    pytest.importorskip("model2vec", reason="model2vec is not installed")
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
