"""ONNX files: they give the model's vectors, with onnxruntime and tokenizers alone, or they are not written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from distcse import exporting
from distcse.errors import EncoderError
from distcse.export import main
from distcse.exporting import Exports, export_onnx
from distcse.models import Encoder
from distcse.models.head import Dense, DenseShape
from distcse.rank_space import RankSpaceEncoder
from distcse.recipe import StudentSection
from distcse.sharing import prepare
from tests.models import make_cross_encoder

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

TEMPLATE = 'This sentence : "{sentence}" means [MASK].'


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], labelled: Path
) -> tuple[Path, Exports]:
    """A student with narrow words (an ELECTRA) and a prompt, exported in full and in int8."""
    folder = tmp_path_factory.mktemp("export") / "model"
    section = StudentSection(
        backbone=str(tiny("bert")), layers=[0, 2], pooling="mean", max_length=24, embedding_size=16, prompt="a man: "
    )
    Encoder.from_section(section).save(folder)
    (folder / "README.md").write_text(
        "---\nlicense: mit\n---\n# A student\n\n## ONNX\n\nOf an earlier export.\n\n## Limits\n\nSome.\n"
    )
    return folder, export_onnx(str(folder), int8=True, data=labelled)


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path]) -> Path:
    """An encoder that pools at [MASK] in a template, exported by the command to a folder of its own."""
    out = tmp_path_factory.mktemp("export") / "out"
    asked = [str(tiny("bert")), "--onnx", "--pooling", "mask", "--prompt", TEMPLATE, "--out", str(out), "--quiet"]
    assert main(asked) == 0
    return out


def test_both_files_are_the_model(exported: tuple[Path, Exports], sentences: list[str]) -> None:
    folder, exports = exported
    full, int8 = exports.files
    assert [file.file for file in exports.files] == [folder / "onnx/model.onnx", folder / "onnx/model_quantized.onnx"]
    assert full.apart < 1e-5 and full.least_cosine > 1 - 1e-5
    assert 0.95 < int8.cosine < 1 and int8.apart > full.apart
    assert exports.spearman == pytest.approx(full.spearman, abs=1e-3)
    assert int8.spearman is not None and abs(int8.spearman - full.spearman) < 1


def test_the_graph_is_what_readers_look_for(exported: tuple[Path, Exports]) -> None:
    import onnx

    folder, exports = exported
    model = onnx.load(exports.files[0].file)
    assert [opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")] == [exports.opset] == [18]

    def axes(value: onnx.ValueInfoProto) -> list[str | int]:
        return [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]

    assert {value.name: axes(value) for value in [*model.graph.input, *model.graph.output]} == {
        "input_ids": ["batch", "length"],
        "attention_mask": ["batch", "length"],
        "last_hidden_state": ["batch", "length", 32],
        "sentence_embedding": ["batch", 32],
    }
    assert model.graph.output[0].name == "last_hidden_state", "readers that pool by themselves take the first"
    kinds = {weights.data_type for weights in onnx.load(exports.files[1].file).graph.initializer}
    assert onnx.TensorProto.INT8 in kinds and not list(folder.rglob("*.data"))
    assert "onnx/model.onnx" in prepare(folder, folder.parent / "parcel").files


def test_linear_maps_after_pooling_are_in_the_file_and_go_along(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Token vectors are no output: who pooled them would have vectors without the maps."""
    import onnx

    encoder = Encoder.load(tiny("bert"), pooling="mean", max_length=16)
    encoder.head.append(Dense(DenseShape(32, 8)))
    encoder.save(tmp_path / "model")
    (file,) = export_onnx(str(tmp_path / "model"), out=tmp_path / "out").files
    assert [output.name for output in onnx.load(file.file).graph.output] == ["sentence_embedding"]
    assert file.least_cosine > 1 - 1e-5
    left = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.safetensors")}
    assert left == {"2_Dense/model.safetensors"}


@pytest.mark.parametrize("which", ["exported", "templated"])
def test_the_cards_code_needs_neither_torch_nor_us(
    which: str, request: pytest.FixtureRequest, tiny: Callable[..., Path]
) -> None:
    made = request.getfixturevalue(which)
    folder, encoder = (
        (made[0], Encoder.load(made[0]))
        if which == "exported"
        else (made, Encoder.load(tiny("bert"), pooling="mask", prompt=TEMPLATE))
    )
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    asked = f"""{code.replace("path/to/this/folder", str(folder))}
import json, sys
assert not {{"torch", "transformers", "distcse"}} & set(sys.modules)
print(json.dumps(vectors.tolist()))"""
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    vectors = np.array(json.loads(done.stdout.splitlines()[-1]))
    wanted = encoder.encode(["How do I sort a list?", "Order the items."], normalize=True)
    assert np.abs(vectors - wanted).max() < 1e-5


def test_a_template_keeps_its_place(templated: Path, tiny: Callable[..., Path]) -> None:
    from onnxruntime import InferenceSession

    session = InferenceSession(str(templated / "onnx" / "model.onnx"))
    assert [value.name for value in session.get_outputs()] == ["sentence_embedding"], "no tokens to be pooled otherwise"
    assert session.get_modelmeta().custom_metadata_map["distcse.prompt"] == TEMPLATE
    encoder = Encoder.load(tiny("bert"), pooling="mask", prompt=TEMPLATE)
    (ids,) = encoder.token_ids(["A man sees the news."])
    given = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), dtype=np.int64)}
    (vectors,) = session.run(None, given)
    assert np.abs(vectors - encoder.encode(["A man sees the news."], normalize=True)).max() < 1e-5


def test_the_card_says_it_once(exported: tuple[Path, Exports]) -> None:
    card = (exported[0] / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n# A student\n") and card.endswith("## Limits\n\nSome.\n")
    assert card.count("## ONNX") == 1 and "earlier" not in card and "`model_quantized.onnx` (" in card


def test_other_vectors_are_refused(
    exported: tuple[Path, Exports], tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of another model, in place of this one's."""
    other = exported[0] / "onnx" / "model.onnx"
    monkeypatch.setattr(exporting, "write_onnx", lambda encoder, file: shutil.copyfile(other, file))
    with pytest.raises(EncoderError, match=r"the ONNX file's vectors differ from torch's by .*; nothing was written"):
        export_onnx(str(tiny("bert")), out=tmp_path / "out", pooling="mean")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    cross = make_cross_encoder(tmp_path / "cross", tiny("bert"))
    ranker = tmp_path / "ranker"
    RankSpaceEncoder.over(Encoder.load(tiny("bert"), pooling="mean"), sentences[:20]).save(ranker)
    for model, told in (
        (str(cross), "is a cross-encoder, which has no vectors"),
        (str(ranker), "ranks among reference sentences"),
        (str(tiny("bert")), "does not say how it pools"),
        ("package:distcse/recipes", "name one: --out FOLDER"),
        (str(tmp_path / "nowhere"), "no model folder"),
    ):
        assert main([model, "--onnx"]) == 1
        assert told in capsys.readouterr().err
    assert main([str(tiny("bert")), "--onnx", "--out", str(tmp_path)]) == 1
    assert "is there already" in capsys.readouterr().err
    assert not (tiny("bert") / "onnx").exists()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("onnx", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["anything", "--onnx"]) == 1
    assert 'an ONNX file needs onnx and onnxscript; pip install "distcse[onnx]"' in capsys.readouterr().err
