"""Model folders of many tools and families: vectors equal sentence-transformers', or one error says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from distcse.errors import (
    ArgumentError,
    DistcseError,
    EncoderSettingError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from distcse.models import CrossEncoder, Encoder, StaticEncoder, TokenizerSpec
from distcse.models.detection import build_detector
from distcse.models.loading import dropouts
from distcse.planning.sizes import read_shape
from distcse.preflight.models import check_model
from distcse.recipe import DetectionSection, EncoderSection, Pooling, StudentSection, TeacherSection
from distcse.teachers.kinds import kind_of
from tests.failures import fails_with
from tests.models import (
    FAMILIES,
    KINDS,
    make_cross_encoder,
    make_custom_code,
    make_encoder,
    make_family,
    make_masked_lm,
    their_vectors,
)

TEXTS = ["A man is playing a guitar.", "The cat sees nothing at all.", "A child"]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
SETTINGS, MODEL = "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING, NORMALIZE = "1_Pooling/config.json", "2_Normalize/config.json"


def same(one: np.ndarray, other: np.ndarray) -> None:
    np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)


def change(file: Path, **values: Any) -> None:
    """Set values in a JSON file."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **values}))


@pytest.fixture(scope="module")
def saved(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a complete folder."""
    encoder = Encoder.load(tiny("bert"), pooling="mean", max_length=12)
    encoder.normalize = True
    folder = tmp_path_factory.mktemp("saved") / "model"
    encoder.save(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of a complete folder."""
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture(scope="module")
def encoder(saved: Path) -> Encoder:
    """Return an encoder that no test changes."""
    return Encoder.load(saved)


@pytest.fixture(scope="module")
def scorer(tiny_cross: Path) -> CrossEncoder:
    """Return a cross-encoder that no test changes."""
    return CrossEncoder.load(tiny_cross)


def refused_everywhere(folder: Path, error: type[DistcseError], *named: str, prompt: str = "") -> None:
    """Assert that a run, its tokenization, a plan and the doctor give the same error."""
    section, messages = EncoderSection(backbone=str(folder), prompt=prompt), set()
    for use in (Encoder.from_section, TokenizerSpec.of, read_shape):
        with fails_with(error, *named) as raised:
            use(section)
        messages.add(str(raised.value))
    with fails_with(error, *named) as raised:
        check_model(section)
    messages.add(str(raised.value))
    assert len(messages) == 1


NIGHTLY = (
    *("deberta", "fnet", "data2vec-text", "rembert", "mobilebert", "ibert", "nomic_bert", "eurobert"),
    *("modernbert", "gemma2", "phi3", "opt", "bloom", "bart"),
)
MATRIX = [
    pytest.param(
        family,
        ("mean", "max", "last_token")[number % 3],  # not cls: a decoder's first token is the same in all texts
        ("", "query: ")[number % 2],
        id=family,
        marks=[pytest.mark.slow] if family in NIGHTLY else [],
    )
    for number, family in enumerate([*FAMILIES, "beam", "esmc", *NIGHTLY])
]
"""Families, each with a pooling and a prompt."""


@pytest.mark.parametrize(("family", "pooling", "prompt"), MATRIX)
def test_a_family_is_read_trained_and_saved_as_sentence_transformers_reads_it(
    family: str, pooling: Pooling, prompt: str, sentences: list[str], tmp_path: Path
) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    source = make_family(tmp_path / "source", family, sentences)
    layers = None if family == "albert" else [0, 2]  # ALBERT's share one set of weights
    section = StudentSection(
        backbone=str(source), pooling=pooling, prompt=prompt, max_length=16, layers=layers, dropout=0.25
    )
    encoder = Encoder.from_section(section)
    assert read_shape(section).dimension == encoder.dimension
    assert {value for _, value in dropouts(encoder.backbone.config)} <= {0.25}
    assert encoder.has_dropout or family in ("beam", "esmc")
    vectors = encoder.encode(TEXTS)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3
    encoder.save(tmp_path / "saved")
    same(Encoder.load(tmp_path / "saved").encode(TEXTS), vectors)
    same(their_vectors(tmp_path / "saved", TEXTS), vectors)


@pytest.mark.parametrize(
    ("family", "weight"), [("esm", "contact_head"), ("xlm", "layer_norm1.2"), ("albert", "AlbertModel")]
)
def test_a_family_whose_other_weights_depend_on_its_layers_keeps_them(
    family: str, weight: str, sentences: list[str], tmp_path: Path
) -> None:
    source = make_family(tmp_path / "source", family, sentences)
    section = StudentSection(backbone=str(source), pooling="mean", max_length=16, layers=[0, 2])
    for use in (Encoder.from_section, read_shape):
        with fails_with(UnsupportedModelError, weight, "layers to null"):
            use(section)
    encoder = Encoder.from_section(section.model_copy(update={"layers": None}))
    encoder.save(tmp_path / "saved")
    same(their_vectors(tmp_path / "saved", TEXTS), encoder.encode(TEXTS))


@pytest.mark.parametrize("family", ["m2m_100", "longt5"])
def test_a_family_with_a_decoder_is_refused_by_name(family: str, folder: Path, sentences: list[str]) -> None:
    source = make_family(folder.parent / "source", family, sentences)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, folder)
    shutil.rmtree(folder / "distcse")
    refused_everywhere(folder, UnsupportedModelError, family, "decoder")


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("bros", {}, "bbox"),
        ("xmod", {"languages": ["en_XX", "de_DE"]}, "language"),
        ("vilt", {}, "pixel_values"),
        ("dpr", {}, "no last_hidden_state"),
    ],
)
def test_a_family_that_needs_more_than_tokens_is_refused(
    family: str, settings: dict[str, Any], named: str, folder: Path, sentences: list[str]
) -> None:
    source = make_family(folder.parent / "source", family, sentences, **settings)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, folder)
    shutil.rmtree(folder / "distcse")
    with fails_with(UnsupportedModelError, family, named, "text encoder"):
        Encoder.load(folder)
    if family == "xmod":
        with fails_with(UnsupportedModelError, family, named):
            CrossEncoder.load(make_cross_encoder(folder.parent / "cross", source))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("xmod", {"languages": ["en_XX", "de_DE"], "default_language": "de_DE"}),
        ("lilt", {"hidden_size": 24, "channel_shrink_ratio": 2}),
        ("big_bird", {}),
    ],
)
def test_a_family_with_defaults_for_its_other_inputs_is_read(
    family: str, settings: dict[str, Any], sentences: list[str], tmp_path: Path
) -> None:
    source = make_family(tmp_path / "source", family, sentences, **settings)
    state = torch.get_rng_state()
    encoder = Encoder.load(source, pooling="mean", max_length=16)
    assert torch.equal(torch.get_rng_state(), state)
    encoder.save(tmp_path / "saved")
    same(their_vectors(tmp_path / "saved", TEXTS), encoder.encode(TEXTS))


def test_custom_code_is_read_planned_trained_and_saved(sentences: list[str], tmp_path: Path) -> None:
    source = make_custom_code(tmp_path / "source", sentences)
    section = StudentSection(
        backbone=str(source), pooling="mean", max_length=16, layers=[0, 2], dropout=0.25, trust_remote_code=True
    )
    encoder = Encoder.from_section(section)
    assert encoder.has_dropout and read_shape(section).dimension == encoder.dimension
    vectors = encoder.encode(TEXTS)
    encoder.save(tmp_path / "saved")
    same(Encoder.load(tmp_path / "saved", trust_remote_code=True).encode(TEXTS), vectors)
    same(their_vectors(tmp_path / "saved", TEXTS, trust_remote_code=True), vectors)
    assert check_model(EncoderSection(backbone=str(tmp_path / "saved"), trust_remote_code=True))
    refused_everywhere(tmp_path / "saved", ModelFormatError, "trust_remote_code")


def test_a_decoder_without_a_padding_token_is_saved_with_one(sentences: list[str], tmp_path: Path) -> None:
    source = make_family(tmp_path / "source", "gpt2", sentences, pad_token_id=None)
    change(source / "tokenizer_config.json", pad_token=None, eos_token="[SEP]")
    encoder = Encoder.load(source, pooling="last_token", max_length=16)
    assert encoder.tokenizer.pad_token is None
    vectors = encoder.encode(TEXTS)
    encoder.save(tmp_path / "saved")
    same(their_vectors(tmp_path / "saved", TEXTS), vectors)


def test_a_tokenizer_with_token_types_is_refused(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    for piece in content["post_processor"]["single"]:
        next(iter(piece.values()))["type_id"] = 1
    file.write_text(json.dumps(content))
    with fails_with(UnsupportedModelError, "token types"):
        Encoder.load(folder)


def into_subfolder(folder: Path) -> None:
    """Move the backbone to 0_Transformer, as sentence-transformers before 2.0 wrote it."""
    inner = folder / "0_Transformer"
    inner.mkdir()
    shutil.rmtree(folder / "distcse")
    for file in list(folder.iterdir()):
        if file.is_file() and file.name not in ("modules.json", MODEL):
            shutil.move(file, inner / file.name)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))


def test_a_backbone_in_a_subfolder_is_read_everywhere(folder: Path) -> None:
    expected = Encoder.load(folder).encode(TEXTS)
    into_subfolder(folder)
    encoder = Encoder.load(folder)
    same(encoder.encode(TEXTS), expected)
    same(their_vectors(folder, TEXTS), expected)
    section = EncoderSection(backbone=str(folder))
    assert TokenizerSpec.of(section).max_length == encoder.max_length == 12
    assert read_shape(section).dimension == encoder.dimension
    assert check_model(section).endswith(str(folder))
    (folder / "0_Transformer" / "model.safetensors").write_bytes(POINTER)
    for use in (lambda: Encoder.load(folder), lambda: TokenizerSpec.of(section), lambda: CrossEncoder.load(folder)):
        with fails_with(ModelFormatError, "0_Transformer/model.safetensors", "Git LFS", "lfs pull"):
            use()
    with fails_with(ModelFormatError, "Git LFS"):
        check_model(section)


def test_settings_are_those_of_the_first_file_that_has_any(folder: Path) -> None:
    (folder / SETTINGS).write_text("{}")
    change(folder / "sentence_roberta_config.json", max_seq_length=4)
    encoder = Encoder.load(folder)
    assert encoder.max_length == 4
    same(encoder.encode(TEXTS), their_vectors(folder, TEXTS))


FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
MEANINGFUL = [
    (MODEL, {"truncate_dim": 8}),
    (MODEL, {"truncate_dim": 1000}),
    (MODEL, {"prompts": {"query": "query: "}, "default_prompt_name": "query"}),
    (MODEL, {"prompts": {"query": "query: "}, "default_prompt_name": None}),
    (MODEL, {"prompts": {"query": None}, "default_prompt_name": "query"}),
    (MODEL, {"default_prompt_name": "document"}),
    (MODEL, {"similarity_fn_name": "dot"}),
    (MODEL, {"similarity_fn_name": None}),
    (SETTINGS, {"tokenizer_args": {"model_max_length": 6}}),
    (SETTINGS, {"processor_kwargs": {"model_max_length": 6}}),
    (SETTINGS, {"config_args": {"layer_norm_eps": 0.1}}),
    (SETTINGS, {"config_kwargs": {"hidden_act": "relu"}}),
    (SETTINGS, {"model_args": {"attn_implementation": "eager"}}),
    (SETTINGS, {"model_kwargs": {"dtype": "float32"}}),
    (SETTINGS, {"max_seq_length": 4}),
    (SETTINGS, {"do_lower_case": True}),
    (SETTINGS, {"unpad_inputs": False}),
    (SETTINGS, {"query_length": 3, "document_length": 4}),
    (SETTINGS, {"tokenizer_args": {"truncation_side": "left", "model_max_length": 6}}),
    (SETTINGS, {"tokenizer_args": {"use_fast": True, "revision": "main"}}),
    (SETTINGS, {"model_args": {"revision": "main"}, "config_args": {"revision": "main", "trust_remote_code": True}}),
    (SETTINGS, {"config_args": {"num_labels": 3}, "do_lower_case": True}),
    (SETTINGS, {"max_seq_length": None}),
    (
        SETTINGS,
        {"modality_config": {"text": FORWARD, "image": FORWARD}, "module_output_name": "token_embeddings"},
    ),
    ("tokenizer_config.json", {"truncation_side": "left"}),
    ("tokenizer_config.json", {"model_max_length": 7}),
    ("config.json", {"output_hidden_states": True}),
    ("config.json", {"return_dict": False}),
    (SETTINGS, {"config_args": {"return_dict": False}}),
    (POOLING, {"pooling_mode_mean_tokens": False}),
    (POOLING, {"pooling_mode": ["max"]}),
    (POOLING, {"pooling_mode": "lasttoken"}),
    (POOLING, {"pooling_mode": ["cls"], "embedding_dimension": 32}),
    (POOLING, {"include_prompt": False}),
    (NORMALIZE, {"module_input_name": "sentence_embedding"}),
]
"""Settings that distcse reads as sentence-transformers does."""


@pytest.mark.parametrize(("file", "values"), MEANINGFUL)
def test_a_setting_has_the_effect_that_it_has_in_sentence_transformers(
    file: str, values: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    change(folder / file, **values)
    expected = their_vectors(folder, TEXTS)
    encoder = Encoder.load(folder)
    same(encoder.encode(TEXTS), expected)
    assert encoder.dimension == expected.shape[1] == read_shape(EncoderSection(backbone=str(folder))).dimension
    encoder.save(tmp_path / "saved")
    same(Encoder.load(tmp_path / "saved").encode(TEXTS), expected)
    same(their_vectors(tmp_path / "saved", TEXTS), expected)


def test_padding_on_the_left_does_not_change_a_texts_vector(folder: Path) -> None:
    """In sentence-transformers it shifts a BERT's positions, by the length of the batch's longest text."""
    change(folder / SETTINGS, tokenizer_args={"padding_side": "left"})
    alone = np.concatenate([their_vectors(folder, [text]) for text in TEXTS])
    same(Encoder.load(folder).encode(TEXTS), alone)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (MODEL, {"model_type": "SparseEncoder"}, "model_type is 'SparseEncoder'"),
    (MODEL, {"similarity_fn_name": "maxsim"}, "similarity_fn_name is 'maxsim'"),
    (MODEL, {"truncate_dim": 0}, "truncate_dim is 0"),
    (MODEL, {"truncate_dim": True}, "truncate_dim is True"),
    (
        MODEL,
        {"default_prompt_name": "passage"},
        "default_prompt_name is 'passage', which distcse does not support (it is none of the prompts: none)",
    ),
    (MODEL, {"prompts": {"query": 3}}, "prompts.query is 3"),
    (SETTINGS, {"max_seq_length": 0}, "max_seq_length is 0"),
    (SETTINGS, {"model_args": {"num_labels": 2}}, "model_args.num_labels is set"),
    (SETTINGS, {"tokenizer_args": 3}, "tokenizer_args is 3"),
    (SETTINGS, {"config_kwargs": ["a"]}, "config_kwargs is ['a']"),
    (SETTINGS, {"transformer_task": "fill-mask"}, "transformer_task is 'fill-mask'"),
    (SETTINGS, {"query_expansion": {"length": 32}}, "query_expansion is {'length': 32}"),
    (SETTINGS, {"module_output_name": "sentence_embedding"}, "module_output_name is 'sentence_embedding'"),
    (SETTINGS, {"modality_config": {"image": {"method": "get_image_features"}}}, "modality_config.text is missing"),
    (
        SETTINGS,
        {"modality_config": {"text": {**FORWARD, "method": "encode"}}},
        "modality_config.text.method is 'encode'",
    ),
    (SETTINGS, {"modality_config": {"text": FORWARD, "message": FORWARD}}, "modality_config.message is"),
    (POOLING, {"pooling_mode": ["cls", "mean"]}, "pooling_mode is ['cls', 'mean']"),
    (POOLING, {"pooling_mode_cls_token": True}, "pooling_mode is ['cls', 'mean']"),
    (POOLING, {"pooling_mode": "attention"}, "pooling_mode is 'attention'"),
    (
        POOLING,
        {"pooling_mode_mean_tokens": False, "pooling_mode_weightedmean_tokens": True},
        "pooling_mode is 'weightedmean'",
    ),
    (POOLING, {"skip_special_tokens": True}, "skip_special_tokens is True"),
    (NORMALIZE, {"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'"),
    ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "quantized weights"),
    ("adapter_config.json", {"base_model_name_or_path": "other"}, "merge_and_unload"),
]
"""Settings that distcse does not follow."""


@pytest.mark.parametrize(("file", "values", "named"), REFUSED)
def test_a_setting_that_is_not_followed_is_refused_by_name(
    file: str, values: dict[str, Any], named: str, folder: Path
) -> None:
    change(folder / file, **values)
    refused_everywhere(folder, UnsupportedModelError, str(folder), named)


def test_a_pooling_without_its_file_is_refused(folder: Path) -> None:
    """Reading it as mean pooling would be a guess."""
    (folder / "1_Pooling" / "config.json").unlink()
    refused_everywhere(folder, ModelFormatError, str(folder / "1_Pooling" / "config.json"), "does not exist")


@pytest.mark.parametrize("size", [0, 5000])
def test_weights_that_were_not_copied_to_their_end_are_named(size: int, folder: Path) -> None:
    shutil.rmtree(folder / "distcse")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:size])
    with fails_with(ModelFormatError, str(folder)):
        Encoder.load(folder)


@pytest.mark.parametrize(("key", "size"), [("vocab_size", 5000), ("intermediate_size", 48)])
def test_weights_of_another_shape_than_the_config_says_are_named(
    key: str, size: int, folder: Path, tiny_cross: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.rmtree(folder / "distcse")
    cross = shutil.copytree(tiny_cross, tmp_path / "cross")
    generator = make_masked_lm(tmp_path / "generator", tiny())
    encoder = Encoder.load(generator, pooling="mean")
    for source in (folder, cross, generator):
        change(source / "config.json", **{key: size})
    for use in (
        lambda: Encoder.load(folder),
        lambda: CrossEncoder.load(cross),
        lambda: CrossEncoder.fresh(folder, 16),
        lambda: build_detector(DetectionSection(generator=str(generator)), encoder, encoder, "fp32"),
    ):
        with fails_with(ModelFormatError, "weights do not have the shape", str(size), "of the same model"):
            use()


@pytest.mark.parametrize(("kind", "head"), [("bert", "classifier.weight"), ("roberta", "classifier.out_proj.weight")])
def test_a_start_with_other_labels_gets_a_new_head(
    kind: str, head: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    start = make_cross_encoder(tmp_path / "nli", tiny(kind), labels=3)
    weights = load_file(start / "model.safetensors")
    assert len(weights[head]) == 3
    torch.manual_seed(5)
    fresh = CrossEncoder.fresh(start, 16)
    assert fresh.model.config.num_labels == 1
    named = dict(fresh.model.named_parameters())
    assert (
        named[head].shape == (1, 32) and 0.005 < float(named[head].detach().std()) < 0.05
    )  # initializer_range is 0.02
    others = [name for name in weights if not name.startswith(head.rpartition(".")[0])]
    assert len(others) > 30 and all(torch.equal(named[name], weights[name]) for name in others)
    torch.manual_seed(5)
    assert torch.equal(named[head], dict(CrossEncoder.fresh(start, 16).model.named_parameters())[head])
    fresh.save(tmp_path / "saved")
    saved = CrossEncoder.load(tmp_path / "saved", 16)
    assert all(torch.equal(weight, named[name]) for name, weight in saved.model.named_parameters())
    np.testing.assert_allclose(saved.score(PAIRS), fresh.eval().score(PAIRS), rtol=1e-6)
    change(start / "config.json", intermediate_size=48)
    with fails_with(ModelFormatError, "weights do not have the shape", "48"):
        CrossEncoder.fresh(start, 16)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("custom_st.Transformer", 3),
        ("sentence_transformers.models.LayerNorm", 3),
        ("sentence_transformers.models.Pooling", 3),
        ("sentence_transformers.models.Dense", 1),
        ("sentence_transformers.base.modules.Router", 0),
        ("sentence_transformers.models.StaticEmbedding", 0),
    ],
)
def test_modules_are_refused_by_name(kind: str, place: int, folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules.insert(place, {"idx": 3, "name": "3", "path": "", "type": kind})
    (folder / "modules.json").write_text(json.dumps(modules))
    refused_everywhere(folder, UnsupportedModelError, str(folder), kind.rsplit(".", 1)[-1])


def test_modules_without_pooling_are_not_called_a_plain_folder(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:1]))
    with fails_with(EncoderSettingError, str(folder), "no Pooling in modules.json", "set pooling"):
        Encoder.load(folder)


def test_a_dropout_module_does_nothing_at_inference(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    kind = "sentence_transformers.models.Dropout"
    modules.insert(2, {"idx": 3, "name": "3", "path": "3_Dropout", "type": kind})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "3_Dropout").mkdir()
    (folder / "3_Dropout" / "config.json").write_text('{"dropout": 0.5}')
    same(Encoder.load(folder).encode(TEXTS), their_vectors(folder, TEXTS))


def shard(folder: Path) -> list[Path]:
    """Split the weights into two files with an index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {f"model-0000{part}-of-00002.safetensors": names[part - 1 :: 2] for part in (1, 2)}
    for file, keys in parts.items():
        save_file({key: weights[key] for key in keys}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    shutil.rmtree(folder / "distcse")
    return [folder / file for file in parts]


def test_sharded_weights_are_read_and_a_lost_shard_is_named(folder: Path) -> None:
    expected = Encoder.load(folder).encode(TEXTS)
    _, last = shard(folder)
    same(Encoder.load(folder).encode(TEXTS), expected)
    last.write_bytes(POINTER)
    with fails_with(ModelFormatError, str(last), "Git LFS"):
        Encoder.load(folder)
    last.unlink()
    with fails_with(ModelFormatError, last.name, "index.json"):
        Encoder.load(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_read_in_float32(dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel

    shutil.rmtree(folder / "distcse")
    AutoModel.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    theirs = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    same(Encoder.load(folder).encode(TEXTS), theirs.encode(TEXTS, show_progress_bar=False))


@pytest.mark.parametrize(
    "name", ["config.json", POOLING, "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_a_git_lfs_pointer_is_named(name: str, folder: Path) -> None:
    shutil.rmtree(folder / "distcse")
    (folder / name).write_bytes(POINTER)
    with fails_with(ModelFormatError, name, "Git LFS", "lfs pull"):
        Encoder.load(folder)


def test_named_prompts_are_used_and_kept(folder: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    prompts = {"query": "query: ", "passage": "passage: "}
    change(folder / MODEL, prompts=prompts)
    encoder = Encoder.from_section(StudentSection(backbone=str(folder), pooling=None, max_length=None))
    encoder.save(tmp_path / "saved")
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    again = Encoder.load(tmp_path / "saved")
    for name in ("query", "passage", "document"):
        expected = theirs.encode(TEXTS, prompt_name=name, show_progress_bar=False)
        same(encoder.encode(TEXTS, prompt_name=name), expected)
        same(again.encode(TEXTS, prompt_name=name), expected)
    with fails_with(EncoderSettingError, "'title'", "query, passage"):
        encoder.encode(TEXTS, prompt_name="title")
    encoder.prompt = "passage: "
    encoder.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / MODEL).read_text())["default_prompt_name"] == "passage"
    same(Encoder.load(tmp_path / "saved").encode(TEXTS), encoder.encode(TEXTS, prompt_name="passage"))


def test_a_cross_encoder_of_sentence_transformers_is_read(tiny: Callable[..., Path], tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder as Theirs

    model = Theirs(str(make_cross_encoder(tmp_path / "plain", tiny("bert"))), device="cpu")
    model.save_pretrained(str(tmp_path / "theirs"))
    pairs = [("A man.", "A child"), ("The cat sees.", "A man is playing.")]
    np.testing.assert_allclose(
        CrossEncoder.load(tmp_path / "theirs").score(pairs), model.predict(pairs, show_progress_bar=False), atol=1e-5
    )
    change(tmp_path / "theirs" / MODEL, prompts={"query": "Given: "}, default_prompt_name="query")
    with fails_with(UnsupportedModelError, "Given: "):
        CrossEncoder.load(tmp_path / "theirs")


PAIRS = [("A man.", "A child"), ("The cat sees.", "A man is playing.")]


@pytest.mark.parametrize(
    ("file", "values", "activation"),
    [
        (MODEL, {"activation_fn": "torch.nn.modules.linear.Identity"}, "Identity"),
        (MODEL, {"activation_fn": "torch.nn.modules.activation.Tanh"}, "Tanh"),
        ("config.json", {"sentence_transformers": {"activation_fn": "torch.nn.Identity", "version": "4"}}, "Identity"),
        ("config.json", {"sentence_transformers": {"version": "4.1.0.dev0"}}, "Sigmoid"),
        ("config.json", {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "Identity"),
    ],
)
def test_a_cross_encoders_activation_is_that_of_sentence_transformers(
    file: str, values: dict[str, Any], activation: str, tiny_cross: Path, tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder as Theirs

    def their_scores(folder: Path) -> Any:
        return Theirs(str(folder), device="cpu").predict(PAIRS, show_progress_bar=False)

    cross = tmp_path / "cross"
    Theirs(str(tiny_cross), device="cpu").save_pretrained(str(cross))
    if file != MODEL:
        for name in ("modules.json", MODEL):  # which only versions after 5.3 write
            (cross / name).unlink()
    change(cross / file, **values)
    ours = CrossEncoder.load(cross)
    assert ours.activation.endswith(activation)
    same(ours.score(PAIRS), their_scores(cross))
    ours.save(tmp_path / "saved")
    same(their_scores(tmp_path / "saved"), their_scores(cross))
    same(CrossEncoder.load(tmp_path / "saved").score(PAIRS), their_scores(cross))
    CrossEncoder.fresh(cross, 16).save(tmp_path / "fresh")  # which learns probabilities
    assert CrossEncoder.load(tmp_path / "fresh").activation.endswith("Sigmoid")


@pytest.mark.parametrize("name", ["torch.nn.modules.activation.Softplus", "torch.sigmoid", 3])
def test_an_activation_that_is_not_computed_is_refused(name: Any, tiny_cross: Path, tmp_path: Path) -> None:
    cross = shutil.copytree(tiny_cross, tmp_path / "cross")
    change(cross / "config.json", sentence_transformers={"activation_fn": name})
    with fails_with(UnsupportedModelError, repr(name), "Identity"):
        CrossEncoder.load(cross)
    (check,) = kind_of(TeacherSection(backbone=str(cross))).check_source()
    assert check.verdict == "fail" and repr(name) in check.found


@pytest.mark.parametrize("uses_default", [True, False])
def test_a_prompt_that_is_not_pooled_is_refused_everywhere(uses_default: bool, folder: Path) -> None:
    change(folder / "1_Pooling" / "config.json", include_prompt=False)
    change(folder / MODEL, prompts={"query": "query: "}, default_prompt_name="query" if uses_default else None)
    prompt = "" if uses_default else "passage: "
    refused_everywhere(folder, UnsupportedModelError, str(folder), "include_prompt", prompt=prompt)


def as_arrow(texts: list[str]) -> Any:
    import pyarrow

    return pyarrow.array(texts, pyarrow.string())


def as_series(texts: list[str]) -> Any:
    import pandas

    return pandas.Series(texts, index=range(7, 7 + len(texts)), dtype=object)


def as_frame_columns(texts: list[str]) -> list[Any]:
    """Return the columns and the index that pandas and pyarrow make of texts."""
    import pandas
    import pyarrow

    kinds = [pandas.Series(texts, dtype=kind) for kind in ("string", "category")]
    return [*kinds, pandas.Index(texts), pyarrow.chunked_array([texts]), pyarrow.array(texts, pyarrow.string_view())]


def test_texts_come_in_any_column(encoder: Encoder) -> None:
    for column in as_frame_columns(TEXTS):
        same(encoder.encode(column), encoder.encode(TEXTS))


@pytest.mark.parametrize(
    "container",
    [
        list,
        tuple,
        np.array,
        lambda texts: np.array(texts, object),
        iter,
        as_series,
        as_arrow,
        lambda texts: dict.fromkeys(texts).keys(),
    ],
)
def test_texts_come_in_any_container(container: Callable[[list[str]], Any], encoder: Encoder) -> None:
    same(encoder.encode(container(TEXTS)), encoder.encode(TEXTS))
    assert encoder.encode(container(TEXTS[:0])).shape == (0, encoder.dimension)


def test_one_text_has_one_vector(encoder: Encoder, saved: Path) -> None:
    for text in (TEXTS[0], np.str_(TEXTS[0])):
        vector = encoder.encode(text)
        assert vector.shape == (encoder.dimension,)
        same(vector, their_vectors(saved, TEXTS[:1])[0])


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        (["a", None], ["texts[1]", "None"]),
        (["a", "b", 3], ["texts[2]", "3", "int"]),
        ([float("nan")], ["texts[0]", "nan"]),
        ([b"a"], ["texts[0]", "bytes"]),
        (bytearray(b"ab"), ["found bytearray"]),
        (memoryview(b"ab"), ["found memoryview"]),
        (frozenset({"a"}), ["frozenset"]),
        ([Path("a")], ["texts[0]", "PosixPath"]),
        ([["a"]], ["texts[0]", "list"]),
        ((text for text in ["a", None]), ["texts[1]"]),
        (None, ["NoneType"]),
        (5, ["int"]),
        (b"abc", ["bytes"]),
        ({"text": "a"}, ["dict"]),
        ({"a", "b"}, ["set"]),
        (np.array("a"), ["ndarray"]),
        (torch.tensor(1.0), ["Tensor"]),
        (np.array([["a", "b"]]), ["texts[0]", "ndarray"]),
        (as_series(["a", None]), ["texts[1]", "None"]),
        (["a", "b \ud83d"], ["texts[1]", r"'\ud83d'", "surrogate"]),
        ("\ud83d", ["texts[0]", "surrogate"]),
    ],
)
def test_what_is_no_text_is_refused_with_its_place(texts: Any, named: list[str], encoder: Encoder) -> None:
    with fails_with(ArgumentError, *named):
        encoder.encode(texts)


def test_groups_of_texts_are_checked_as_texts_are(encoder: Encoder) -> None:
    for groups, named in (([["a"], ["b", None]], "texts[1]"), (["a text"], "found str")):
        with fails_with(ArgumentError, named):
            list(encoder.encode_each(groups))


def test_a_precision_or_prompt_of_another_librarys_is_refused(encoder: Encoder) -> None:
    """sentence-transformers has `precision="int8"`, which quantizes the vectors."""
    with fails_with(EncoderSettingError, "precision is 'int8'", "fp32, bf16, fp16"):
        encoder.encode(TEXTS, precision="int8")
    with fails_with(EncoderSettingError, "['query']"):
        encoder.encode(TEXTS, prompt_name=cast(Any, ["query"]))


def test_a_table_is_no_list_of_texts(encoder: Encoder) -> None:
    import pandas
    import pyarrow

    frame = pandas.DataFrame({"id": [1], "text": ["a"]})
    arrow = pyarrow.Table.from_pandas(frame)
    for table in (frame, arrow, arrow.to_batches()[0]):
        with fails_with(ArgumentError, f"found {type(table).__name__}", "list of str"):
            encoder.encode(table)


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        (("ab", "cd"), ["pairs[0]", "'ab'", "[(first, second)]"]),
        ("ab", ["str", "[(first, second)]"]),
        ([("a", "b"), ("a", None)], ["pairs[1]", "None", "[(first, second)]"]),
        ([("a", "b", "c")], ["pairs[0]"]),
        ([("a", "\ud83d")], ["pairs[0]", "surrogate"]),
        (np.array("a"), ["ndarray"]),
        ([None], ["pairs[0]", "NoneType"]),
        (None, ["NoneType"]),
    ],
)
def test_what_is_no_pair_is_refused_with_its_place(pairs: Any, named: list[str], scorer: CrossEncoder) -> None:
    with fails_with(ArgumentError, *named):
        scorer.score(pairs)


def test_pairs_come_in_any_container(scorer: CrossEncoder) -> None:
    pairs = [("A man.", "A child"), ("The cat sees.", "A man is playing.")]
    expected = scorer.score(pairs)
    for container in (tuple, iter, np.array, lambda pairs: [list(pair) for pair in pairs]):
        np.testing.assert_array_equal(scorer.score(container(pairs)), expected)
    assert scorer.score([]).shape == (0,)


WITH_VERSION_4 = (
    "transformers==4.57.*",
    "sentence-transformers==5.1.*",
    "huggingface-hub<1",
    "tokenizers<0.23",
    "datasets<4.5",
)
READ = """
import json, sys
from pathlib import Path
import numpy as np
from sentence_transformers import CrossEncoder, SentenceTransformer
texts, found = json.loads(sys.argv[2]), {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    if folder.name == "cross":
        found["cross"] = CrossEncoder(str(folder), device="cpu").predict([(texts[0], text) for text in texts])
    else:
        found[folder.name] = SentenceTransformer(str(folder), device="cpu").encode(texts)
np.savez(sys.argv[3], **found)
"""


def as_version_4_wrote(folder: Path, **config: Any) -> Path:
    """Give a start the names that transformers 4 wrote."""
    change(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", additional_special_tokens=[])
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "rope_parameters": None, **config}))
    return folder


def student_of_modernbert(tmp_path: Path, sentences: list[str], layers: list[int]) -> Encoder:
    start = make_encoder(tmp_path / f"start{layers}", "modernbert", sentences, layers=6)
    section = StudentSection(backbone=str(start), layers=layers, pooling="mean", max_length=12)
    as_version_4_wrote(start, global_rope_theta=40000.0, local_rope_theta=1000.0)
    return Encoder.from_section(section)


def test_a_folder_has_the_names_that_transformers_4_reads(
    sentences: list[str], tiny_cross: Path, tmp_path: Path
) -> None:
    student_of_modernbert(tmp_path, sentences, [0, 2, 4]).save(tmp_path / "odd")
    student_of_modernbert(tmp_path, sentences, [0, 1, 3]).save(tmp_path / "encoder")
    start = as_version_4_wrote(shutil.copytree(tiny_cross, tmp_path / "cross-start"))
    CrossEncoder.load(start).save(tmp_path / "cross")
    for name in ("encoder", "cross"):
        settings = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in settings
        assert settings["model_input_names"] == ["input_ids", "attention_mask"]
    config = json.loads((tmp_path / "encoder" / "config.json").read_text())
    assert (config["global_rope_theta"], config["local_rope_theta"]) == (40000.0, 1000.0)
    assert same_kinds(config) and same_kinds(json.loads((tmp_path / "odd" / "config.json").read_text()))


def same_kinds(config: dict[str, Any]) -> bool:
    """Whether transformers 4, which does not read `layer_types`, has the same layers."""
    period = config["global_attn_every_n_layers"]
    kinds = ["sliding_attention" if layer % period else "full_attention" for layer in range(len(config["layer_types"]))]
    return kinds == config["layer_types"]


@pytest.mark.slow
def test_transformers_4_reads_a_student_of_each_family(
    tiny: Callable[..., Path], sentences: list[str], tiny_cross: Path, tmp_path: Path
) -> None:
    """In another environment: older packages in a folder that Python reads first, with this one's torch."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "older")]
    subprocess.run([*install, *WITH_VERSION_4], check=True)
    written, ours = tmp_path / "written", {}

    def save(name: str, encoder: Encoder) -> None:
        encoder.save(written / name)
        ours[name] = encoder.encode(TEXTS)

    for kind in KINDS:
        start = as_version_4_wrote(shutil.copytree(tiny(kind), tmp_path / kind))
        save(kind, Encoder.load(start, pooling="mean", max_length=12))
    for family in FAMILIES:
        theta = {"rope_theta": 40000.0} if FAMILIES[family].get("head_dim") else {}
        start = as_version_4_wrote(make_family(tmp_path / family, family, sentences), **theta)
        save(family, Encoder.load(start, pooling="mean", max_length=12))
    save("modernbert of three layers", student_of_modernbert(tmp_path, sentences, [0, 1, 3]))
    static = StaticEncoder.of_tokens(Encoder.load(tiny("bert"), pooling="mean", max_length=12))
    static.save(written / "static")
    ours["static"] = static.encode(TEXTS)
    cross = CrossEncoder.load(as_version_4_wrote(shutil.copytree(tiny_cross, tmp_path / "cross")))
    cross.save(written / "cross")
    ours["cross"] = cross.score([(TEXTS[0], text) for text in TEXTS])

    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "older")}
    call = [sys.executable, "-c", READ, str(written), json.dumps(TEXTS), str(tmp_path / "theirs.npz")]
    subprocess.run(call, env=environment, check=True)
    theirs = np.load(tmp_path / "theirs.npz")
    assert set(theirs) == set(ours)
    for name, vectors in ours.items():
        np.testing.assert_allclose(theirs[name], vectors, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("named", "inside"),
    [
        ("models--x--y", "models--x--y/snapshots/0a1b"),
        ("runs", "runs/one/model"),
        ("sweep", "sweep/runs/t1/model"),
        ("runs/one/checkpoints", "runs/one/model"),
        ("runs/one/checkpoints/step-000100", "runs/one/model"),
    ],
)
def test_a_folder_above_a_model_names_the_models(
    named: str, inside: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny("bert"), tmp_path / inside)
    (tmp_path / named).mkdir(parents=True, exist_ok=True)
    if inside == "runs/one/model":
        (tmp_path / "runs" / "one" / "recipe.yaml").touch()
    with fails_with(ModelNotFoundError, str(tmp_path / inside)):
        Encoder.load(tmp_path / named, pooling="mean")
