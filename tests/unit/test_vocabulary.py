"""Folders whose tokenizer has no vocabulary: every command refuses them, and the advice in the errors repairs them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from distcse import cli
from distcse.errors import (
    EncoderError,
    TokenizerError,
)
from distcse.model_source import is_hub_id
from distcse.models import CrossEncoder, Encoder, TokenizerSpec
from distcse.models.detection import build_detector
from distcse.models.folder import ModelFolder
from distcse.recipe import DetectionSection, EncoderSection, recipe_yaml
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.models import KINDS, make_cross_encoder, make_family, make_masked_lm, without_tokenizer
from tests.pairs import make_mutual_recipe

EXPECTED_FILES = "tokenizer.json, vocab.txt"
"""The files that the error for a missing tokenizer names first."""
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "t5", "qwen3"])
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


@pytest.fixture
def bare(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A BERT without tokenizer files."""
    return without_tokenizer(tiny("bert"), tmp_path / "bare")


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"tokenizer_config.json": '{"tokenizer_class": "BertTokenizer", "do_lower_case": true}'}, EXPECTED_FILES),
        ({"added_tokens.json": '{"guitar": 5}'}, EXPECTED_FILES),
        ({"vocab.txt": "\n".join(SPECIAL)}, EXPECTED_FILES),
        ({"vocab.txt": "\n".join([*SPECIAL, *(f"[unused{n}]" for n in range(9))])}, "the folder has vocab.txt"),
        ({"vocab.json": '{"a": 0, "man": 1}'}, "the folder has vocab.json"),
        ({"vocab.txt": ""}, "AutoTokenizer.from_pretrained(NAME)"),
        ({"tokenizer.json": ""}, "tokenizer.json"),
        ({"sentencepiece.bpe.model": "no model"}, "sentencepiece.bpe.model"),
        ({"tokenizer.json": '{"version": "1.0", "mod'}, "AutoTokenizer.from_pretrained(NAME)"),
    ],
)
def test_files_without_a_vocabulary_are_refused(files: dict[str, str], named: str, bare: Path) -> None:
    for name, text in files.items():
        (bare / name).write_text(text)
    with fails_with(TokenizerError, str(bare), named):
        ModelFolder.read(bare, trust_remote_code=False).load_tokenizer()


def test_a_tokenizer_file_without_words_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "emptied")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    for words in ({word: n for n, word in enumerate(SPECIAL)}, {}):
        content["model"]["vocab"] = words
        file.write_text(json.dumps(content))
        with fails_with(TokenizerError, str(folder), "the folder has tokenizer.json"):
            Encoder.load(folder, pooling="mean")


@pytest.fixture(scope="module")
def places(
    tmp_path_factory: pytest.TempPathFactory,
    tiny: Callable[..., Path],
    tiny_cross: Path,
    labelled: Path,
    sentences: list[str],
) -> dict[str, Path]:
    """Recipe files of small runs whose models are complete, and models without tokenizer files."""
    folder = tmp_path_factory.mktemp("places")
    places = {name: folder / f"{name}.yaml" for name in ("recipe", "groups")}
    complete = make_recipe(folder, tiny("bert"), [tiny("minilm")], sentences, "training.max_steps=2")
    places["recipe"].write_text(recipe_yaml(complete))
    mutual = make_mutual_recipe(folder / "mutual", {"one": tiny("bert"), "other": tiny("roberta")}, sentences)
    places["groups"].write_text(recipe_yaml(mutual))
    masked = make_masked_lm(folder / "masked", tiny("bert"))
    sources = {"bare": tiny("bert"), "scorer": tiny_cross, "generator": masked}
    without = {name: without_tokenizer(source, folder / f"bare {name}") for name, source in sources.items()}
    return {**places, **without, "data": labelled, "out": folder / "onnx"}


STUDENT, TEACHER = "student.backbone={bare}", "teachers.encoders.0.backbone={bare}"
GENERATOR = "objective.detection.generator={generator}"
GROUPS = ("{groups} groups.0.backbone={bare}", "{groups} groups.0.cross_backbone={bare}")


@pytest.mark.parametrize(
    "command",
    [
        f"train {{recipe}} {STUDENT} --quiet",
        f"train {{recipe}} {TEACHER} teachers.mode=live --dry-run --quiet",
        "train {recipe} teachers.encoders.0.backbone={scorer} --dry-run --quiet",
        f"train {{recipe}} {GENERATOR} --dry-run --quiet",
        *(f"train {group} --dry-run --quiet" for group in GROUPS),
        f"embed {{recipe}} {TEACHER} --quiet",
        "evaluate {scorer} --data {data} --suite sts --pooling mean --quiet --dry-run",
        "export {bare} --onnx --pooling mean --out {out}",
        f"plan {{recipe}} {TEACHER}",
        f"plan {GROUPS[0]}",
        f"doctor {{recipe}} {GENERATOR}",
    ],
)
def test_every_command_refuses_it_in_one_line(
    command: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    status = cli.main([part.format_map(places) for part in command.split()])
    output = capsys.readouterr()
    assert status == 1 and "Traceback" not in output.err
    if command.startswith("doctor"):
        assert re.search(rf"fail +model +\S.* .*{re.escape(EXPECTED_FILES)}", output.out)
        return
    (line,) = (line for line in output.err.splitlines() if line.startswith("distcse: "))
    assert TokenizerError.code in line and EXPECTED_FILES in line


def test_a_hub_model_is_checked_when_it_is_downloaded(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that, the hub cache may contain weights without a tokenizer, from `AutoModel.from_pretrained`."""
    monkeypatch.setattr("distcse.model_source.fetch_from_hub", lambda *arguments: bare)
    with fails_with(TokenizerError, str(bare), EXPECTED_FILES):
        Encoder.load("nobody/has-this", pooling="mean")


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
    ours, first = (Encoder.load(path, pooling="mean").encode(sentences[:8]) for path in (bare, tiny("bert")))
    np.testing.assert_allclose(ours, first, atol=1e-6)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_the_advice_for_a_pickled_model_works(
    kind: str, tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
    old, new = pickled(shutil.copytree(tiny(kind), tmp_path / "old")), tmp_path / "new"
    run_advice(old, lambda path: Encoder.load(path, pooling="mean", max_length=16), FOLDER=str(new))
    ours, first = (
        Encoder.load(path, pooling="mean", max_length=16).encode(sentences[:8]) for path in (new, tiny(kind))
    )
    np.testing.assert_allclose(ours, first, atol=1e-6)


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
