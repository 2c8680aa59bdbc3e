"""The pages: links land, the site builds without a warning, and what they quote exists. The notebooks run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import distcse
from tests.conftest import ROOT

FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def pages() -> list[Path]:
    """All Markdown files that git knows, or would; the package's own are templates."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", ":!distcse"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    found = [ROOT / name for name in listed] or [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [page for page in found if page.is_file()]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings, and those written as HTML."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(re.findall(r"^#{1,6} +(.+)$", text, re.M)))
    slugs = re.sub(r"[^\w\n -]", "", headings.lower()).replace(" ", "-").split("\n")
    return {*slugs, *re.findall(r'<a (?:id|name)="([^"]+)"', text)}


def test_every_relative_link_and_anchor_lands() -> None:
    dead, count = [], 0
    for page in pages():
        text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
        for link in re.findall(r"\]\(([^)\s:]+)\)", text):
            count += 1
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            is_there = target.exists() and target.is_relative_to(ROOT)
            if not is_there or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert not dead and count > 300


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tutorials" / "a-run.html").is_file()
    assert "repository:" not in (tmp_path / "explanation" / "architecture.html").read_text()


def test_the_python_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    named = {name.removeprefix("distcse.") for name in re.findall(r"^::: (\S+)$", page, re.M)}
    assert named == {*distcse.__all__, "testing.check_term"} - {"__version__"}


def test_troubleshooting_quotes_messages_that_there_are() -> None:
    sources = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "distcse").rglob("*.py")))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)  # a message over several lines of code
    page = (ROOT / "docs" / "reference" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", page)
    assert len(quoted) > 15
    assert not [part for message in quoted for part in re.split(r"\s*…\s*", message) if part and part not in joined]


def test_the_tests_that_hold_promises_are_there() -> None:
    named = re.findall(
        r"`(\w+/test_\w+\.py)(?:::(test_\w+))?`", (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    )
    assert len(named) > 100
    for file, function in named:
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8") or not function, (
            file,
            function,
        )


def test_the_files_that_make_names_are_there() -> None:
    """Those of the night's targets too, which no other check runs."""
    targets = ("test", "test-faults", "test-oldest-ray", "test-slow")
    shown = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = {word.partition("::") for word in re.findall(r"\S*\btests/\S*", shown)}
    assert len(named) > 8
    for file, _, function in named:
        assert (ROOT / file).exists() and (not function or f"def {function}(" in (ROOT / file).read_text()), file


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_committed_as_run_from_top_to_bottom(file: Path) -> None:
    code = [cell for cell in json.loads(file.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = json.dumps([cell["outputs"] for cell in code])
    assert "text/" in outputs and not re.search("/tmp/|/home/|/root/|/opt/|/Users/|Traceback", outputs)


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, tmp_path: Path, minilm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient, _ = (pytest.importorskip(name) for name in ("nbformat", "nbclient", "ipykernel"))
    monkeypatch.setenv("DISTCSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(file, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output["data"]["text/markdown"] for output in outputs if "text/markdown" in output.get("data", {})]
    assert shown and all("|" in "".join(table) for table in shown)
