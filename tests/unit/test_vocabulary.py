"""Folders whose tokenizer has no vocabulary: every command refuses them, and the advice in the errors repairs them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from distcse import cli
from distcse.errors import (
    EncoderError,
    ModelFormatError,
    ModelNotFoundError,
    TokenizerError,
)
from distcse.model_source import is_hub_id
from distcse.models import CrossEncoder, Encoder, TokenizerSpec, resolve_model
from distcse.models.detection import build_detector
from distcse.models.folder import ModelFolder
from distcse.recipe import DetectionSection, EncoderSection, recipe_yaml
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.models import KINDS, make_cross_encoder, make_family, make_masked_lm, without_tokenizer
from tests.pairs import make_mutual_recipe

EXPECTED_FILES = "tokenizer.json, vocab.txt"
"""The files that the error for a missing tokenizer names first."""
DOCTOR_LINE = rf"fail +model +\S+ .*{re.escape(EXPECTED_FILES)}"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 231508\n"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Folders


@pytest.mark.parametrize("family", [*KINDS, "mpnet", "deberta-v2", "albert", "xlm-roberta", "mt5", "qwen3", "gpt2"])
def test_no_family_gets_a_tokenizer_without_vocabulary(
    family: str, tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    source = tiny(family) if family in KINDS else make_family(tmp_path / "source", family, sentences)
    folder = without_tokenizer(source, tmp_path / "bare")
    fix = f"AutoTokenizer.from_pretrained(NAME).save_pretrained({str(folder)!r})"
    section = EncoderSection(backbone=str(folder))  # without a pooling, which would not help
    for use in (Encoder.from_section, TokenizerSpec.of):
        with fails_with(TokenizerError, EXPECTED_FILES, fix):
            use(section)


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    return ModelFolder.read(folder, trust_remote_code).load_tokenizer()


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
    ("files", "kind", "named"),
    [
        (
            {"tokenizer_config.json": '{"tokenizer_class": "BertTokenizer", "do_lower_case": true}'},
            TokenizerError,
            [EXPECTED_FILES],
        ),
        ({"added_tokens.json": '{"guitar": 5}'}, TokenizerError, [EXPECTED_FILES]),
        ({"vocab.txt": lines_of(SPECIAL)}, TokenizerError, ["BertTokenizer", "tokenizer.json, vocab.txt"]),
        (
            {"vocab.txt": lines_of([*SPECIAL, *(f"[unused{n}]" for n in range(9))])},
            TokenizerError,
            ["the folder has vocab.txt"],
        ),
        ({"vocab.json": '{"a": 0, "man": 1}'}, TokenizerError, ["the folder has vocab.json"]),
        ({"vocab.txt": ""}, TokenizerError, ["vocab.txt", "AutoTokenizer.from_pretrained(NAME)"]),
        ({"tokenizer.json": ""}, TokenizerError, ["tokenizer.json"]),
        ({"sentencepiece.bpe.model": "no model"}, TokenizerError, ["sentencepiece.bpe.model"]),
        (
            {"tokenizer.json": '{"version": "1.0", "mod'},
            TokenizerError,
            ["bare", "AutoTokenizer.from_pretrained(NAME)"],
        ),
        ({"vocab.txt": POINTER}, ModelFormatError, ["vocab.txt", "Git LFS", "git -C", "lfs pull"]),
        ({"tokenizer.json": POINTER}, ModelFormatError, ["tokenizer.json", "Git LFS"]),
        ({"tokenizer_config.json": POINTER}, ModelFormatError, ["tokenizer_config.json", "Git LFS"]),
    ],
)
def test_files_without_a_vocabulary_are_refused(
    files: dict[str, str], kind: type[EncoderError], named: list[str], bare: Path
) -> None:
    for name, text in files.items():
        (bare / name).write_text(text)
    with fails_with(kind, str(bare), *named):
        load_tokenizer(bare, trust_remote_code=False)


def test_a_tokenizer_file_without_words_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "emptied")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    for words in ({word: n for n, word in enumerate(SPECIAL)}, {}):
        content["model"]["vocab"] = words
        file.write_text(json.dumps(content))
        with fails_with(TokenizerError, str(folder), "the folder has tokenizer.json"):
            Encoder.load(folder, pooling="mean")


def test_half_of_a_byte_pair_vocabulary_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = without_tokenizer(tiny("roberta"), tmp_path / "half")
    (folder / "vocab.json").write_text(json.dumps(vocabulary_of(tiny("roberta"))))
    with fails_with(TokenizerError, str(folder), "the folder has vocab.json"):
        load_tokenizer(folder, trust_remote_code=False)
    merges = json.loads((tiny("roberta") / "tokenizer.json").read_text())["model"]["merges"]
    (folder / "merges.txt").write_text(POINTER)
    with fails_with(ModelFormatError, str(folder / "merges.txt"), "Git LFS"):
        load_tokenizer(folder, trust_remote_code=False)
    (folder / "merges.txt").write_text("#version: 0.2\n" + lines_of([" ".join(pair) for pair in merges]))
    assert "Ġman" in load_tokenizer(folder, trust_remote_code=False).tokenize("A man is playing.")


def test_older_files_load_and_unused_pointers_are_allowed(tiny: Callable[..., Path], bare: Path) -> None:
    words = vocabulary_of(tiny("bert"))
    (bare / "vocab.txt").write_text(lines_of(sorted(words, key=words.__getitem__)))
    text = "A man is playing a guitar."
    expected = load_tokenizer(tiny("bert"), False)(text)["input_ids"]
    assert load_tokenizer(bare, False)(text)["input_ids"] == expected
    shutil.copy(tiny("bert") / "tokenizer.json", bare)
    (bare / "vocab.txt").write_text(POINTER)  # as with git lfs pull --include tokenizer.json
    assert load_tokenizer(bare, False)(text)["input_ids"] == expected


def test_custom_code_may_read_files_of_other_names(tiny: Callable[..., Path], bare: Path) -> None:
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
    """The recipe file of a small run whose models are complete."""
    complete = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.max_steps=2")
    (tmp_path / "job.yaml").write_text(recipe_yaml(complete))
    return str(tmp_path / "job.yaml")


def assert_one_error_line(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("distcse: ")]
    assert status == 1 and len(lines) == 1 and "Traceback" not in output.err, output.err
    assert TokenizerError.code in lines[0] and EXPECTED_FILES in lines[0], lines[0]


@pytest.mark.parametrize(
    ("role", "options"),
    [
        ("student", []),
        *(
            (role, ["--dry-run"])
            for role in ("student", "teacher", "live teacher", "cross-encoder teacher", "generator")
        ),
    ],
)
def test_a_run_and_its_dry_run_refuse_it(
    role: str,
    options: list[str],
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
    assert_one_error_line(cli.main(["train", recipe, *overrides, *options, "--quiet"]), capsys)


@pytest.mark.parametrize("part", ["backbone", "cross_backbone"])
def test_mutual_distillation_refuses_it(
    part: str,
    tiny: Callable[..., Path],
    bare: Path,
    tmp_path: Path,
    sentences: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    mutual = make_mutual_recipe(tmp_path, {"one": tiny("bert"), "other": tiny("roberta")}, sentences)
    (tmp_path / "groups.yaml").write_text(recipe_yaml(mutual))
    arguments = [str(tmp_path / "groups.yaml"), f"groups.0.{part}={bare}"]
    assert_one_error_line(cli.main(["train", *arguments, "--dry-run", "--quiet"]), capsys)
    assert_one_error_line(cli.main(["train", *arguments, "--quiet"]), capsys)
    assert_one_error_line(cli.main(["plan", *arguments]), capsys)
    assert cli.main(["doctor", *arguments]) == 1 and re.search(DOCTOR_LINE, capsys.readouterr().out)


def test_embedding_evaluation_and_export_refuse_it(
    recipe: str, bare: Path, bare_scorer: Path, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ([], ["--dry-run"]):
        arguments = [recipe, f"teachers.encoders.0.backbone={bare}", "--quiet"]
        assert_one_error_line(cli.main(["embed", *arguments, *options]), capsys)
        for model in (bare, bare_scorer):
            arguments = [str(model), "--data", str(labelled), "--suite", "sts", "--pooling", "mean", "--quiet"]
            assert_one_error_line(cli.main(["evaluate", *arguments, *options]), capsys)
    arguments = [str(bare), "--onnx", "--pooling", "mean", "--out", str(tmp_path / "onnx")]
    assert_one_error_line(cli.main(["export", *arguments]), capsys)


def test_a_plan_and_the_doctor_refuse_it(
    recipe: str, bare: Path, bare_generator: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for override in (
        f"student.backbone={bare}",
        f"teachers.encoders.0.backbone={bare}",
        f"objective.detection={{generator: {bare_generator}}}",
    ):
        assert_one_error_line(cli.main(["plan", recipe, override]), capsys)
        assert cli.main(["doctor", recipe, override]) == 1
        assert re.search(DOCTOR_LINE, capsys.readouterr().out)


@pytest.mark.slow
def test_a_plan_needs_only_the_config(recipe: str, bare: Path) -> None:
    """As for a model that is not downloaded yet."""
    (bare / "model.safetensors").unlink()
    assert cli.main(["plan", recipe, f"student.backbone={bare}"]) == 0


def test_a_hub_model_is_checked_when_it_is_downloaded(
    recipe: str, bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before that, the hub cache may contain weights without a tokenizer, from `AutoModel.from_pretrained`."""
    monkeypatch.setattr("distcse.model_source.fetch_from_hub", lambda *arguments: bare)
    with fails_with(TokenizerError, str(bare), EXPECTED_FILES):
        Encoder.load("nobody/has-this", pooling="mean")
    assert cli.main(["plan", recipe, "student.backbone=nobody/has-this"]) == 0
    capsys.readouterr()
    assert cli.main(["doctor", recipe, "student.backbone=nobody/has-this"]) == 1
    assert "not in the hub's cache, and HF_HUB_OFFLINE is set" in capsys.readouterr().out


def test_a_download_that_fails_without_a_message_names_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with fails_with(ModelNotFoundError, "'nobody/has-this'", "ConnectionResetError"):
        resolve_model("nobody/has-this")


def test_hub_ids_are_distinguished_from_paths(tiny: Callable[..., Path]) -> None:
    assert is_hub_id("bert-base-uncased") and is_hub_id("nobody/has-this")
    for name in (str(tiny("bert")), "./x", "~/x", "package:x/y", "s3://bucket/x", "a/b/c", "tests"):
        assert not is_hub_id(name), name


# The advice in the errors


def run_advice(folder: Path, load: Callable[[Path], object], **names: object) -> None:
    """Run the Python code at the end of the error for a folder."""
    import sentence_transformers

    with pytest.raises(EncoderError) as raised:
        load(folder)
    code = re.search(r"(?:: |; )((?:for kind in|AutoTokenizer|SentenceTransformer\().*)$", str(raised.value))
    assert code is not None, str(raised.value)
    classes = {name: getattr(transformers, name) for name in re.findall(r"(?:Auto|Bert|Roberta|T5)[A-Z]\w+", code[1])}
    exec(code[1], {**vars(sentence_transformers), **classes, **names})


def pickled(folder: Path) -> Path:
    """Pickle a model's weights."""
    for file in folder.rglob("*.safetensors"):
        torch.save(load_file(file), file.with_name("pytorch_model.bin"))
        file.unlink()
    return folder


def test_the_advice_for_a_folder_without_tokenizer_works(
    tiny: Callable[..., Path], bare: Path, sentences: list[str]
) -> None:
    run_advice(bare, lambda path: Encoder.load(path, pooling="mean"), NAME=str(tiny("bert")))
    assert_same_vectors(Encoder.load(bare, pooling="mean"), Encoder.load(tiny("bert"), pooling="mean"), sentences[:8])


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_the_advice_for_a_pickled_model_works(
    kind: str, tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
    old, new = pickled(shutil.copytree(tiny(kind), tmp_path / "old")), tmp_path / "new"
    run_advice(old, lambda path: Encoder.load(path, pooling="mean", max_length=16), FOLDER=str(new))
    ours, first = (Encoder.load(path, pooling="mean", max_length=16) for path in (new, tiny(kind)))
    assert_same_vectors(ours, first, sentences[:8])


def test_the_advice_keeps_pooling_and_dense_modules(
    tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
    from sentence_transformers import SentenceTransformer, models

    backbone = models.Transformer(str(tiny("bert")), max_seq_length=16)
    parts = [backbone, models.Pooling(32, "cls"), models.Dense(32, 8), models.Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save_pretrained(str(tmp_path / "first"))
    first = Encoder.load(tmp_path / "first")
    for name, files in (
        ("all", ["model.safetensors", "2_Dense/model.safetensors"]),
        ("dense", ["2_Dense/model.safetensors"]),
    ):
        old, new = shutil.copytree(tmp_path / "first", tmp_path / f"{name} old"), tmp_path / f"{name} new"
        for file in files:
            torch.save(load_file(old / file), (old / file).with_name("pytorch_model.bin"))
            (old / file).unlink()
        run_advice(old, Encoder.load, FOLDER=str(new))
        assert_same_vectors(Encoder.load(new), first, sentences[:8])


def test_the_advice_keeps_heads(tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]) -> None:
    pairs = list(zip(sentences[:8], sentences[8:16], strict=True))
    first = make_cross_encoder(tmp_path / "first", tiny("bert"))
    expected = CrossEncoder.load(first).score(pairs)
    run_advice(pickled(first), CrossEncoder.load, FOLDER=str(tmp_path / "scorer"))
    np.testing.assert_allclose(CrossEncoder.load(tmp_path / "scorer").score(pairs), expected, atol=1e-6)
    student, section = Encoder.load(tiny("bert"), pooling="cls"), DetectionSection(generator=str(tmp_path / "masked"))
    make_masked_lm(tmp_path / "masked", tiny("bert"))
    run_advice(
        pickled(tmp_path / "masked"), lambda _: build_detector(section, student, student), FOLDER=str(tmp_path / "lm")
    )
    build_detector(DetectionSection(generator=str(tmp_path / "lm")), student, student)


def assert_same_vectors(ours: Encoder, theirs: Encoder, texts: Sequence[str]) -> None:
    np.testing.assert_allclose(ours.encode(texts), theirs.encode(texts), atol=1e-6)
