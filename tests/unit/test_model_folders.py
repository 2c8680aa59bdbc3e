"""Model folders of many tools and families: vectors equal sentence-transformers', or one error says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from transformers import CONFIG_MAPPING, AutoConfig

from distcse.errors import (
    DistcseError,
    EncoderSettingError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from distcse.models import CrossEncoder, Encoder, StaticEncoder, TokenizerSpec
from distcse.models.detection import build_detector
from distcse.models.folder import model_class
from distcse.models.loading import dropouts
from distcse.planning.sizes import read_shape
from distcse.preflight.models import check_model
from distcse.recipe import DetectionSection, EncoderSection, Pooling, StudentSection
from tests.failures import fails_with
from tests.models import (
    FAMILIES,
    KINDS,
    assert_saved_alike,
    change_json,
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
TOKENIZER = "tokenizer_config.json"


def same(one: np.ndarray, other: np.ndarray) -> None:
    np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def saved(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a complete folder, which no test changes."""
    encoder = Encoder.load(tiny("bert"), pooling="mean", max_length=12)
    encoder.normalize = True
    folder = tmp_path_factory.mktemp("saved") / "model"
    encoder.save(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of a complete folder."""
    return shutil.copytree(saved, tmp_path / "model")


def refused_everywhere(folder: Path, error: type[DistcseError], *named: str, **settings: Any) -> None:
    """Assert that a run, its tokenization, a plan and the doctor give the same error."""
    section, messages = EncoderSection(backbone=str(folder), **settings), set()
    for use in (Encoder.from_section, TokenizerSpec.of, read_shape, check_model):
        with fails_with(error, *named) as raised:
            use(section)
        messages.add(str(raised.value))
    assert len(messages) == 1


MATRIX: list[tuple[str, Pooling, str]] = [
    ("bert", "cls", "query: "),
    ("roberta", "mean", ""),
    ("distilbert", "max", "query: "),
    ("modernbert", "mean", ""),
    ("t5", "max", "query: "),
    ("albert", "mean", "query: "),
    ("deberta-v2", "max", ""),
    ("mpnet", "last_token", "query: "),
    ("longformer", "mean", ""),
    ("gpt2", "last_token", "query: "),
    ("xlnet", "max", ""),
    ("qwen3", "last_token", ""),
    ("gemma3_text", "mean", "query: "),
    ("big_bird", "max", ""),
    ("beam", "mean", ""),
    ("esmc", "max", "query: "),
]
"""Families for which loading, layers, length or saving differ, with all poolings; a decoder's first token is always the same."""
NIGHTLY = (
    *("minilm", "xlm-roberta", "camembert", "electra", "ernie", "roformer", "convbert", "mt5", "llama", "mistral"),
    *("deberta", "fnet", "data2vec-text", "rembert", "mobilebert", "ibert", "nomic_bert", "eurobert"),
    *("gemma2", "phi3", "opt", "bloom", "bart", "esm", "xlm", "xmod", "lilt"),
)
WITHOUT_SELECTION = ("albert", "esm", "xlm")
"""Families whose other weights depend on the layers: ALBERT's share one set."""
SIZES: dict[str, dict[str, Any]] = {
    "xmod": {"languages": ["en_XX", "de_DE"], "default_language": "de_DE"},
    "lilt": {"hidden_size": 24, "channel_shrink_ratio": 2},
}


@pytest.mark.parametrize(
    ("family", "pooling", "prompt"),
    [
        *MATRIX,
        *(
            pytest.param(
                family, ("mean", "max", "last_token")[number % 3], ("", "query: ")[number % 2], marks=pytest.mark.slow
            )
            for number, family in enumerate(NIGHTLY)
        ),
    ],
)
def test_a_family_is_read_trained_and_saved_as_other_libraries_read_it(
    family: str, pooling: Pooling, prompt: str, tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    if family not in (*KINDS, *CONFIG_MAPPING):
        pytest.skip(f"this transformers has no {family}")
    is_kind = family in KINDS
    source = tiny(family) if is_kind else make_family(tmp_path / "source", family, sentences, **SIZES.get(family, {}))
    layers = None if family in WITHOUT_SELECTION or "_avg" in pooling else [0, 2]
    section = StudentSection(
        backbone=str(source), pooling=pooling, prompt=prompt, max_length=16, layers=layers, dropout=0.25
    )
    state = torch.get_rng_state()
    encoder = Encoder.from_section(section)
    assert torch.equal(torch.get_rng_state(), state)
    assert read_shape(section).dimension == encoder.dimension
    assert {value for _, value in dropouts(encoder.backbone.config)} <= {0.25}
    assert encoder.has_dropout or family in ("beam", "esmc")
    vectors = encoder.encode(TEXTS)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3
    again = assert_saved_alike(encoder, tmp_path / "saved", TEXTS)
    assert (again.pooling, again.prompt, again.max_length) == (pooling, prompt, 16)
    kind = model_class(AutoConfig.from_pretrained(tmp_path / "saved"))
    _, report = kind.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


@pytest.mark.parametrize(
    ("family", "weight"), [("esm", "contact_head"), ("xlm", "layer_norm1.2"), ("albert", "AlbertModel")]
)
def test_layers_of_a_family_whose_other_weights_depend_on_them_are_refused(
    family: str, weight: str, sentences: list[str], tmp_path: Path
) -> None:
    source = make_family(tmp_path / "source", family, sentences)
    for use in (Encoder.from_section, read_shape):
        with fails_with(UnsupportedModelError, weight, "layers to null"):
            use(StudentSection(backbone=str(source), pooling="mean", max_length=16, layers=[0, 2]))


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("longt5", {}, "decoder"),
        ("bros", {}, "bbox"),
        ("xmod", {"languages": ["en_XX", "de_DE"]}, "language"),
        ("vilt", {}, "pixel_values"),
        ("dpr", {}, "no last_hidden_state"),
    ],
)
def test_a_family_that_needs_more_than_tokens_is_refused(
    family: str, settings: dict[str, Any], named: str, sentences: list[str], tmp_path: Path
) -> None:
    source = make_family(tmp_path / "source", family, sentences, **settings)
    with fails_with(UnsupportedModelError, family, named):
        Encoder.load(source, pooling="mean", max_length=16)
    if family == "xmod":
        with fails_with(UnsupportedModelError, family, named):
            CrossEncoder.load(make_cross_encoder(tmp_path / "cross", source))


def test_custom_code_is_read_planned_trained_and_saved(sentences: list[str], tmp_path: Path) -> None:
    source = make_custom_code(tmp_path / "source", sentences)
    section = StudentSection(
        backbone=str(source), pooling="mean", max_length=16, layers=[0, 2], dropout=0.25, trust_remote_code=True
    )
    encoder = Encoder.from_section(section)
    assert encoder.has_dropout and read_shape(section).dimension == encoder.dimension
    assert_saved_alike(encoder, tmp_path / "saved", TEXTS, trust_remote_code=True)
    assert check_model(EncoderSection(backbone=str(tmp_path / "saved"), trust_remote_code=True))
    refused_everywhere(tmp_path / "saved", ModelFormatError, "trust_remote_code")


def test_a_decoder_without_a_padding_token_is_saved_with_one(sentences: list[str], tmp_path: Path) -> None:
    source = make_family(tmp_path / "source", "gpt2", sentences, pad_token_id=None)
    change_json(source / TOKENIZER, pad_token=None, eos_token="[SEP]")
    encoder = Encoder.load(source, pooling="last_token", max_length=16)
    assert encoder.tokenizer.pad_token is None
    assert_saved_alike(encoder, tmp_path / "saved", TEXTS)


def test_a_tokenizer_with_token_types_is_refused(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    for piece in content["post_processor"]["single"]:
        next(iter(piece.values()))["type_id"] = 1
    file.write_text(json.dumps(content))
    with fails_with(UnsupportedModelError, "token types"):
        Encoder.load(folder)


def test_a_backbone_in_a_subfolder_is_read_everywhere(folder: Path) -> None:
    """In 0_Transformer, as sentence-transformers before 2.0 wrote it."""
    expected, inner = Encoder.load(folder).encode(TEXTS), folder / "0_Transformer"
    inner.mkdir()
    shutil.rmtree(folder / "distcse")
    for file in list(folder.iterdir()):
        if file.is_file() and file.name not in ("modules.json", MODEL):
            shutil.move(file, inner / file.name)
    change_modules(folder, lambda modules: modules[0].update(path="0_Transformer"))
    encoder = Encoder.load(folder)
    same(encoder.encode(TEXTS), expected)
    same(their_vectors(folder, TEXTS), expected)
    section = EncoderSection(backbone=str(folder))
    assert TokenizerSpec.of(section).max_length == encoder.max_length == 12
    assert read_shape(section).dimension == encoder.dimension
    assert check_model(section).endswith(str(folder))
    (inner / "model.safetensors").write_bytes(POINTER)
    refused_everywhere(folder, ModelFormatError, "0_Transformer/model.safetensors", "Git LFS", "lfs pull")


def change_modules(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the list of modules.json in place."""
    modules = json.loads((folder / "modules.json").read_text())
    change(modules)
    (folder / "modules.json").write_text(json.dumps(modules))


def test_settings_are_those_of_the_first_file_that_has_any(folder: Path) -> None:
    (folder / SETTINGS).write_text("{}")
    change_json(folder / "sentence_roberta_config.json", max_seq_length=4)
    encoder = Encoder.load(folder)
    assert encoder.max_length == 4
    same(encoder.encode(TEXTS), their_vectors(folder, TEXTS))


FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
FOLLOWED: list[dict[str, dict[str, Any]]] = [
    {
        MODEL: {"prompts": {"query": "query: "}, "default_prompt_name": "query", "truncate_dim": 8},
        SETTINGS: {"tokenizer_args": {"model_max_length": 6}},
    },
    {
        MODEL: {"prompts": {"query": "query: "}, "default_prompt_name": None, "truncate_dim": 1000},
        SETTINGS: {"max_seq_length": 4, "config_args": {"return_dict": False}},
    },
    {
        MODEL: {"prompts": {"query": None}, "default_prompt_name": "query", "similarity_fn_name": "dot"},
        SETTINGS: {"config_args": {"layer_norm_eps": 0.1}, "processor_kwargs": {"model_max_length": 6}},
        POOLING: {"pooling_mode": ["max"]},
    },
    {
        MODEL: {"default_prompt_name": "document", "similarity_fn_name": None},
        SETTINGS: {"config_kwargs": {"hidden_act": "relu"}, "model_args": {"attn_implementation": "eager"}},
        POOLING: {"pooling_mode_mean_tokens": False},
    },
    {
        SETTINGS: {
            "model_kwargs": {"dtype": "float32"},
            "query_length": 3,
            "document_length": 4,
            "unpad_inputs": False,
        },
        POOLING: {"pooling_mode": "lasttoken"},
        "config.json": {"output_hidden_states": True},
    },
    {
        SETTINGS: {
            "tokenizer_args": {"truncation_side": "left", "model_max_length": 6, "use_fast": True, "revision": "main"},
            "model_args": {"revision": "main"},
            "config_args": {"revision": "main", "trust_remote_code": True},
        },
        POOLING: {"pooling_mode": ["cls"], "embedding_dimension": 32},
    },
    {
        SETTINGS: {"max_seq_length": None, "do_lower_case": True, "config_args": {"num_labels": 3}},
        TOKENIZER: {"model_max_length": 7},
        "config.json": {"return_dict": False},
    },
    {
        SETTINGS: {
            "max_seq_length": 6,
            "modality_config": {"text": FORWARD, "image": FORWARD},
            "module_output_name": "token_embeddings",
        },
        TOKENIZER: {"truncation_side": "left"},
        POOLING: {"include_prompt": False},
        NORMALIZE: {"module_input_name": "sentence_embedding"},
    },
]
"""Settings that distcse reads as sentence-transformers does."""


@pytest.mark.parametrize("changes", FOLLOWED)
def test_settings_have_the_effect_that_they_have_in_sentence_transformers(
    changes: dict[str, dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    for file, values in changes.items():
        change_json(folder / file, **values)
    expected = their_vectors(folder, TEXTS)
    encoder = Encoder.load(folder)
    same(encoder.encode(TEXTS), expected)
    assert encoder.dimension == expected.shape[1] == read_shape(EncoderSection(backbone=str(folder))).dimension
    assert_saved_alike(encoder, tmp_path / "saved", TEXTS)


def test_padding_on_the_left_does_not_change_a_texts_vector(folder: Path) -> None:
    """In sentence-transformers it shifts a BERT's positions, by the length of the batch's longest text."""
    change_json(folder / SETTINGS, tokenizer_args={"padding_side": "left"})
    alone = np.concatenate([their_vectors(folder, [text]) for text in TEXTS])
    same(Encoder.load(folder).encode(TEXTS), alone)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (MODEL, {"model_type": "SparseEncoder"}, "model_type is 'SparseEncoder'"),
    (MODEL, {"similarity_fn_name": "maxsim"}, "similarity_fn_name is 'maxsim'"),
    (MODEL, {"truncate_dim": 0}, "truncate_dim is 0"),
    (MODEL, {"default_prompt_name": "passage"}, "default_prompt_name is 'passage', which distcse does not support"),
    (MODEL, {"prompts": {"query": 3}}, "prompts.query is 3"),
    (SETTINGS, {"max_seq_length": 0}, "max_seq_length is 0"),
    (SETTINGS, {"model_args": {"num_labels": 2}}, "model_args.num_labels is set"),
    (SETTINGS, {"tokenizer_args": 3}, "tokenizer_args is 3"),
    (SETTINGS, {"transformer_task": "fill-mask"}, "transformer_task is 'fill-mask'"),
    (SETTINGS, {"query_expansion": {"length": 32}}, "query_expansion is {'length': 32}"),
    (SETTINGS, {"module_output_name": "sentence_embedding"}, "module_output_name is 'sentence_embedding'"),
    (SETTINGS, {"modality_config": {"image": {"method": "get_image_features"}}}, "modality_config.text is missing"),
    (SETTINGS, {"modality_config": {"text": {**FORWARD, "method": "encode"}}}, "text.method is 'encode'"),
    (SETTINGS, {"modality_config": {"text": FORWARD, "message": FORWARD}}, "modality_config.message is"),
    (POOLING, {"pooling_mode_cls_token": True}, "pooling_mode is ['cls', 'mean']"),
    (POOLING, {"pooling_mode": "attention"}, "pooling_mode is 'attention'"),
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
    change_json(folder / file, **values)
    refused_everywhere(folder, UnsupportedModelError, str(folder), named)


@pytest.mark.parametrize(("default", "prompt"), [("query", ""), (None, "passage: ")])
def test_a_prompt_that_is_not_pooled_is_refused(default: str | None, prompt: str, folder: Path) -> None:
    change_json(folder / POOLING, include_prompt=False)
    change_json(folder / MODEL, prompts={"query": "query: "}, default_prompt_name=default)
    refused_everywhere(folder, UnsupportedModelError, str(folder), "include_prompt", prompt=prompt)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("custom_st.Transformer", 3),
        ("sentence_transformers.models.LayerNorm", 3),
        ("sentence_transformers.models.Pooling", 3),
        ("sentence_transformers.models.Dense", 1),
        ("sentence_transformers.base.modules.Router", 0),
    ],
)
def test_modules_are_refused_by_name(kind: str, place: int, folder: Path) -> None:
    module = {"idx": 3, "name": "3", "path": "", "type": kind}
    change_modules(folder, lambda modules: modules.insert(place, module))
    refused_everywhere(folder, UnsupportedModelError, str(folder), kind.rsplit(".", 1)[-1])


def test_a_pooling_is_not_guessed(folder: Path) -> None:
    (folder / POOLING).unlink()
    refused_everywhere(folder, ModelFormatError, str(folder / POOLING), "does not exist")
    change_modules(folder, lambda modules: modules.__delitem__(slice(1, None)))
    with fails_with(EncoderSettingError, str(folder), "no Pooling in modules.json", "set pooling"):
        Encoder.load(folder)


def test_a_dropout_module_does_nothing_at_inference(folder: Path) -> None:
    module = {"idx": 3, "name": "3", "path": "3_Dropout", "type": "sentence_transformers.models.Dropout"}
    change_modules(folder, lambda modules: modules.insert(2, module))
    (folder / "3_Dropout").mkdir()
    (folder / "3_Dropout" / "config.json").write_text('{"dropout": 0.5}')
    same(Encoder.load(folder).encode(TEXTS), their_vectors(folder, TEXTS))


def test_weights_that_are_a_git_lfs_pointer_or_not_complete_are_named(folder: Path) -> None:
    shutil.rmtree(folder / "distcse")
    file = folder / "model.safetensors"
    content, weights = file.read_bytes(), load_file(file)
    weights.pop(lost := "encoder.layer.1.output.dense.weight")
    for part, *named in (
        (POINTER, "lfs pull"),
        (b"",),
        (content[:5000],),
        (save(weights, {"format": "pt"}), "1 weights", lost),  # which transformers would draw at random
    ):
        file.write_bytes(part)
        with fails_with(ModelFormatError, str(folder), *named):
            Encoder.load(folder)
    file.unlink()
    with fails_with(ModelFormatError, str(folder), "model.safetensors"):
        Encoder.load(folder)


def test_weights_of_another_shape_than_the_config_says_are_named(
    folder: Path, tiny_cross: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.rmtree(folder / "distcse")
    cross = shutil.copytree(tiny_cross, tmp_path / "cross")
    generator = make_masked_lm(tmp_path / "generator", tiny())
    encoder = Encoder.load(generator, pooling="mean")
    for source in (folder, cross, generator):
        change_json(source / "config.json", vocab_size=5000)
    for use in (
        lambda: Encoder.load(folder),
        lambda: CrossEncoder.load(cross),
        lambda: CrossEncoder.fresh(folder, 16),
        lambda: build_detector(DetectionSection(generator=str(generator)), encoder, encoder, "fp32"),
    ):
        with fails_with(ModelFormatError, "weights do not have the shape", "5000", "of the same model"):
            use()


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


def test_half_precision_weights_are_read_in_float32(folder: Path) -> None:
    from transformers import AutoModel

    shutil.rmtree(folder / "distcse")
    AutoModel.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    expected = their_vectors(folder, TEXTS, model_kwargs={"dtype": torch.float32})
    same(Encoder.load(folder).encode(TEXTS), expected)


def test_named_prompts_are_used_and_kept(folder: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    prompts = {"query": "query: ", "passage": "passage: "}
    change_json(folder / MODEL, prompts=prompts)
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


WITH_VERSION_4 = "transformers==4.57.* sentence-transformers==5.1.* huggingface-hub<1 tokenizers<0.23 datasets<4.5"
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
    change_json(folder / TOKENIZER, tokenizer_class="PreTrainedTokenizerFast", additional_special_tokens=[])
    change_json(folder / "config.json", **{"rope_parameters": None, **config})
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
        settings = json.loads((tmp_path / name / TOKENIZER).read_text())
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
    subprocess.run([*install, *WITH_VERSION_4.split()], check=True)
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
        ("sweep", "sweep/runs/t1/model"),
        *((named, "runs/one/model") for named in ("runs", "runs/one/checkpoints", "runs/one/checkpoints/step-000100")),
    ],
)
def test_a_folder_above_a_model_names_the_models(
    named: str, inside: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny("bert"), tmp_path / inside)
    (tmp_path / named).mkdir(parents=True, exist_ok=True)
    (tmp_path / inside).with_name("recipe.yaml").touch()
    with fails_with(ModelNotFoundError, str(tmp_path / inside)):
        Encoder.load(tmp_path / named, pooling="mean")
