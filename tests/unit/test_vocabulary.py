"""Folders whose tokenizer has no vocabulary: refused by every command that opens them; and what we advise makes complete ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from distcse import doctor, embed, evaluate, export, plan, train
from distcse.detection import build_detector
from distcse.errors import EncoderError
from distcse.models import CrossEncoder, Encoder, TokenizerSpec
from distcse.models.loading import load_tokenizer
from distcse.models.source import is_hub_id
from distcse.recipe import DetectionSection, EncoderSection, recipe_yaml
from tests.jobs import make_recipe
from tests.models import KINDS, make_cross_encoder, make_masked_lm, without_tokenizer
from tests.pairs import make_mutual_recipe

NOTHING = r"has no tokenizer: it holds none of tokenizer\.json, vocab\.txt"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 231508\n"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
FAMILIES = {
    **{family: SIZES for family in ("mpnet", "xlm-roberta", "deberta", "deberta-v2", "electra", "camembert")},
    "albert": {**SIZES, "embedding_size": 8},
    "qwen3": {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0},
    "gemma3_text": {**SIZES, "num_key_value_heads": 1, "head_dim": 8},
    "gpt2": {"vocab_size": 300, "n_embd": 16, "n_layer": 1, "n_head": 2},
}  # fmt: skip


# Folders


@pytest.mark.parametrize("family", [*KINDS, *FAMILIES])
def test_no_family_gets_a_made_up_tokenizer(family: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    if family in KINDS:
        without_tokenizer(tiny(family), folder)
    else:
        AutoModel.from_config(AutoConfig.for_model(family, **FAMILIES[family])).save_pretrained(folder)
    with pytest.raises(EncoderError, match=NOTHING) as refused:
        Encoder.load(folder, pooling="mean", max_length=16)
    assert f"AutoTokenizer.from_pretrained(NAME).save_pretrained({str(folder)!r})" in str(refused.value)
    with pytest.raises(EncoderError, match=NOTHING):
        TokenizerSpec.of(EncoderSection(backbone=str(folder), pooling="mean", max_length=16))


@pytest.fixture
def bare(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A BERT without tokenizer files."""
    return without_tokenizer(tiny("bert"), tmp_path / "bare")


def vocabulary_of(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return found


def lines_of(words: Sequence[str]) -> str:
    return "".join(f"{word}\n" for word in words)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"tokenizer_config.json": '{"tokenizer_class": "BertTokenizer", "do_lower_case": true}'}, NOTHING),
        ({"added_tokens.json": '{"guitar": 5}'}, NOTHING),
        ({"vocab.txt": lines_of(SPECIAL)}, r"without words.* BertTokenizer reads tokenizer\.json, vocab\.txt"),
        ({"vocab.txt": lines_of([*SPECIAL, *(f"[unused{n}]" for n in range(9))])}, r"finds none in vocab\.txt"),
        ({"vocab.json": '{"a": 0, "man": 1}'}, r"finds none in vocab\.json"),
        ({"vocab.txt": ""}, r"vocab\.txt is empty; save the original model's tokenizer there"),
        ({"tokenizer.json": ""}, r"tokenizer\.json is empty"),
        ({"tokenizer.json": '{"version": "1.0", "mod'}, "has no tokenizer that loads: .*; save the original model's"),
        ({"vocab.txt": POINTER}, r"vocab\.txt is a Git LFS pointer, not the file; fetch it: git -C .* lfs pull"),
        ({"tokenizer.json": POINTER}, r"tokenizer\.json is a Git LFS pointer"),
        ({"tokenizer_config.json": POINTER}, r"tokenizer_config\.json is a Git LFS pointer"),
    ],
)
def test_files_without_a_vocabulary_are_refused(files: dict[str, str], told: str, bare: Path) -> None:
    for name, text in files.items():
        (bare / name).write_text(text)
    with pytest.raises(EncoderError, match=told):
        load_tokenizer(bare, trust_remote_code=False)


def test_a_tokenizer_file_whose_words_are_gone_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "emptied")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    for words in ({word: n for n, word in enumerate(SPECIAL)}, {}):
        content["model"]["vocab"] = words
        file.write_text(json.dumps(content))
        with pytest.raises(EncoderError, match=r"without words.* finds none in tokenizer\.json"):
            Encoder.load(folder, pooling="mean")


def test_half_of_a_byte_pair_vocabulary_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = without_tokenizer(tiny("roberta"), tmp_path / "half")
    (folder / "vocab.json").write_text(json.dumps(vocabulary_of(tiny("roberta"))))
    with pytest.raises(EncoderError, match=r"no tokenizer that loads: vocab\.json without merges\.txt"):
        load_tokenizer(folder, trust_remote_code=False)
    merges = json.loads((tiny("roberta") / "tokenizer.json").read_text())["model"]["merges"]
    (folder / "merges.txt").write_text(POINTER)
    with pytest.raises(EncoderError, match=r"merges\.txt is a Git LFS pointer"):
        load_tokenizer(folder, trust_remote_code=False)
    (folder / "merges.txt").write_text("#version: 0.2\n" + lines_of([" ".join(pair) for pair in merges]))
    assert "Ġman" in load_tokenizer(folder, trust_remote_code=False).tokenize("A man is playing.")


def test_older_forms_and_files_that_nobody_reads_are_no_obstacle(tiny: Callable[..., Path], bare: Path) -> None:
    words = vocabulary_of(tiny("bert"))
    (bare / "vocab.txt").write_text(lines_of(sorted(words, key=words.__getitem__)))
    text = "A man is playing a guitar."
    told = load_tokenizer(tiny("bert"), False)(text)["input_ids"]
    assert load_tokenizer(bare, False)(text)["input_ids"] == told
    shutil.copy(tiny("bert") / "tokenizer.json", bare)
    (bare / "vocab.txt").write_text(POINTER)  # as with git lfs pull --include tokenizer.json
    assert load_tokenizer(bare, False)(text)["input_ids"] == told


def test_code_that_reads_files_of_other_names_is_let(tiny: Callable[..., Path], bare: Path) -> None:
    words = vocabulary_of(tiny("bert"))
    (bare / "words.own").write_text(lines_of(sorted(words, key=words.__getitem__)))
    (bare / "own.py").write_text(
        "from transformers import BertTokenizer\n"
        "class OwnTokenizer(BertTokenizer):\n"
        "    vocab_files_names = {'vocab_file': 'words.own'}\n"
    )
    names = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (bare / "tokenizer_config.json").write_text(json.dumps(names))
    assert "guitar" in load_tokenizer(bare, trust_remote_code=True).get_vocab()


# Commands


@pytest.fixture
def bare_scorer(tiny_cross: Path, tmp_path: Path) -> Path:
    """A cross-encoder without tokenizer files."""
    return without_tokenizer(tiny_cross, tmp_path / "bare scorer")


@pytest.fixture
def bare_generator(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A masked language model without tokenizer files."""
    return without_tokenizer(make_masked_lm(tmp_path / "masked", tiny("bert")), tmp_path / "bare-generator")


@pytest.fixture
def recipe(tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]) -> str:
    """The file of a small job whose models are complete."""
    made = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.max_steps=2")
    (tmp_path / "job.yaml").write_text(recipe_yaml(made))
    return str(tmp_path / "job.yaml")


def refused_in_one_line(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("distcse: ")]
    assert status == 1 and len(lines) == 1 and "Traceback" not in shown.err, shown.err
    assert re.search(NOTHING, lines[0]), lines[0]


@pytest.mark.parametrize("how", [["--dry-run"], []], ids=["dry run", "run"])
@pytest.mark.parametrize("role", ["student", "teacher", "live teacher", "cross-encoder teacher", "generator"])
def test_a_run_and_its_dry_run_refuse_it(
    role: str,
    how: list[str],
    recipe: str,
    bare: Path,
    bare_scorer: Path,
    bare_generator: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = [f"teachers.encoders.0.backbone={bare}"]
    if role == "student":
        overrides = [f"student.backbone={bare}"]
    elif role == "live teacher":
        overrides.append("teachers.mode=live")
    elif role == "cross-encoder teacher":
        overrides = [f"teachers.encoders.0.backbone={bare_scorer}"]
    elif role == "generator":
        overrides = [f"objective.detection={{generator: {bare_generator}}}"]
    refused_in_one_line(train.main([recipe, *overrides, *how, "--quiet"]), capsys)


@pytest.mark.parametrize("part", ["backbone", "cross_backbone"])
def test_groups_refuse_it(
    part: str,
    tiny: Callable[..., Path],
    bare: Path,
    tmp_path: Path,
    sentences: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = make_mutual_recipe(tmp_path, {"one": tiny("bert"), "other": tiny("roberta")}, sentences)
    (tmp_path / "groups.yaml").write_text(recipe_yaml(made))
    asked = [str(tmp_path / "groups.yaml"), f"groups.0.{part}={bare}"]
    refused_in_one_line(train.main([*asked, "--dry-run", "--quiet"]), capsys)
    refused_in_one_line(train.main([*asked, "--quiet"]), capsys)
    refused_in_one_line(plan.main(asked), capsys)
    assert doctor.main(asked) == 1 and re.search(rf"fail +model +\S+ {NOTHING}", capsys.readouterr().out)


def test_passes_measurements_and_exports_refuse_it(
    recipe: str, bare: Path, bare_scorer: Path, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for how in ([], ["--dry-run"]):
        given = [recipe, f"teachers.encoders.0.backbone={bare}", "--quiet"]
        refused_in_one_line(embed.main([*given, *how]), capsys)
        for model in (bare, bare_scorer):
            given = [str(model), "--data", str(labelled), "--suite", "sts", "--pooling", "mean", "--quiet"]
            refused_in_one_line(evaluate.main([*given, *how]), capsys)
    given = [str(bare), "--onnx", "--pooling", "mean", "--out", str(tmp_path / "onnx")]
    refused_in_one_line(export.main(given), capsys)


def test_a_plan_and_the_doctor_refuse_it(
    recipe: str, bare: Path, bare_generator: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for override in (
        f"student.backbone={bare}",
        f"teachers.encoders.0.backbone={bare}",
        f"objective.detection={{generator: {bare_generator}}}",
    ):
        refused_in_one_line(plan.main([recipe, override]), capsys)
        assert doctor.main([recipe, override]) == 1
        assert re.search(rf"fail +model +\S+ {NOTHING}", capsys.readouterr().out)


def test_a_plan_is_made_of_a_config_alone(recipe: str, bare: Path) -> None:
    """As for a model that is yet to be fetched."""
    (bare / "model.safetensors").unlink()
    assert plan.main([recipe, f"student.backbone={bare}"]) == 0


def test_a_hubs_folder_is_looked_into_when_it_is_fetched(
    recipe: str, bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before that, its cache may hold what `AutoModel.from_pretrained` fetched: weights without a tokenizer."""
    monkeypatch.setattr("distcse.models.source._from_hub", lambda *given: bare)
    with pytest.raises(EncoderError, match=NOTHING):
        Encoder.load("nobody/has-this", pooling="mean")
    assert plan.main([recipe, "student.backbone=nobody/has-this"]) == 0
    capsys.readouterr()
    assert doctor.main([recipe, "student.backbone=nobody/has-this"]) == 1
    assert "not in the hub's cache, and HF_HUB_OFFLINE is set" in capsys.readouterr().out


def test_names_of_a_hub_are_told_from_places_here(tiny: Callable[..., Path]) -> None:
    assert is_hub_id("bert-base-uncased") and is_hub_id("nobody/has-this")
    for name in (str(tiny("bert")), "./x", "~/x", "package:x/y", "s3://bucket/x", "a/b/c", "tests"):
        assert not is_hub_id(name), name


# What we advise


def advised(folder: Path, load: Callable[[Path], object], **names: object) -> None:
    """Run the Python that the error for a folder ends with."""
    import sentence_transformers

    with pytest.raises(EncoderError) as refused:
        load(folder)
    code = re.search(r"(?:: |; )((?:for kind in|AutoTokenizer|SentenceTransformer\().*)$", str(refused.value))
    assert code is not None, str(refused.value)
    exec(code[1], {**vars(sentence_transformers), **{n: getattr(transformers, n) for n in _CLASSES}, **names})


_CLASSES = ("AutoModel", "AutoTokenizer", "AutoModelForMaskedLM", "AutoModelForSequenceClassification")


def pickled(folder: Path) -> Path:
    """The same model, its weights pickled."""
    for file in folder.rglob("*.safetensors"):
        torch.save(load_file(file), file.with_name("pytorch_model.bin"))
        file.unlink()
    return folder


def test_what_we_advise_for_a_folder_without_tokenizer_works(
    tiny: Callable[..., Path], bare: Path, sentences: list[str]
) -> None:
    advised(bare, lambda path: Encoder.load(path, pooling="mean"), NAME=str(tiny("bert")))
    assert_same_vectors(Encoder.load(bare, pooling="mean"), Encoder.load(tiny("bert"), pooling="mean"), sentences[:8])


@pytest.mark.parametrize("kind", ["bert", "roberta", "t5"])
def test_what_we_advise_for_a_pickled_model_works(
    kind: str, tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
    old, new = pickled(shutil.copytree(tiny(kind), tmp_path / "old")), tmp_path / "new"
    advised(old, lambda path: Encoder.load(path, pooling="mean", max_length=16), FOLDER=str(new))
    ours, first = (Encoder.load(path, pooling="mean", max_length=16) for path in (new, tiny(kind)))
    assert_same_vectors(ours, first, sentences[:8])


def test_what_we_advise_keeps_pooling_and_maps(tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]) -> None:
    from sentence_transformers import SentenceTransformer, models

    backbone = models.Transformer(str(tiny("bert")), max_seq_length=16)
    parts = [backbone, models.Pooling(32, "cls"), models.Dense(32, 8), models.Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save_pretrained(str(tmp_path / "first"))
    first = Encoder.load(tmp_path / "first")
    for name, spoilt in (
        ("all", ["model.safetensors", "2_Dense/model.safetensors"]),
        ("map", ["2_Dense/model.safetensors"]),
    ):
        old, new = shutil.copytree(tmp_path / "first", tmp_path / f"{name} old"), tmp_path / f"{name} new"
        for file in spoilt:
            torch.save(load_file(old / file), (old / file).with_name("pytorch_model.bin"))
            (old / file).unlink()
        advised(old, Encoder.load, FOLDER=str(new))
        assert_same_vectors(Encoder.load(new), first, sentences[:8])


def test_what_we_advise_keeps_heads(tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]) -> None:
    pairs = list(zip(sentences[:8], sentences[8:16], strict=True))
    first = make_cross_encoder(tmp_path / "first", tiny("bert"))
    expected = CrossEncoder.load(first).score(pairs)
    advised(pickled(first), CrossEncoder.load, FOLDER=str(tmp_path / "scorer"))
    np.testing.assert_allclose(CrossEncoder.load(tmp_path / "scorer").score(pairs), expected, atol=1e-6)
    student, section = Encoder.load(tiny("bert"), pooling="cls"), DetectionSection(generator=str(tmp_path / "masked"))
    make_masked_lm(tmp_path / "masked", tiny("bert"))
    advised(
        pickled(tmp_path / "masked"), lambda _: build_detector(section, student, student), FOLDER=str(tmp_path / "lm")
    )
    build_detector(DetectionSection(generator=str(tmp_path / "lm")), student, student)


def assert_same_vectors(ours: Encoder, theirs: Encoder, texts: Sequence[str]) -> None:
    np.testing.assert_allclose(ours.encode(texts), theirs.encode(texts), atol=1e-6)
