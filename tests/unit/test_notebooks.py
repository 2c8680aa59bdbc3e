"""The documentation's notebooks: they run, and are committed with small outputs and without local paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_outputs_are_committed_small_and_without_paths(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    cells = json.loads(text)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] == number for number, cell in enumerate(code, start=1)), (
        "run all cells from top to bottom"
    )
    assert any(cell["outputs"] for cell in code) and len(text) < 20_000
    shown = json.dumps([cell["outputs"] for cell in code])
    for path in ("/tmp/", "/home/", "/root/", "/opt/", "/Users/", "Traceback"):
        assert path not in shown


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, tmp_path: Path, minilm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    monkeypatch.setenv("DISTCSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(file, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    tables = [
        "".join(output["data"]["text/markdown"]) for output in outputs if "text/markdown" in output.get("data", {})
    ]
    assert tables and all("|" in table for table in tables)
