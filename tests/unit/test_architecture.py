"""The layer rule of docs/explanation/architecture.md, as `.importlinter` states it, and two rules that it cannot state."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import takewhile

import pytest

from tests.conftest import ROOT

RULE = (ROOT / ".importlinter").read_text()
PACKAGE = {file.relative_to(ROOT / "distcse").as_posix(): file.read_text() for file in (ROOT / "distcse").rglob("*.py")}


def test_no_module_imports_from_a_layer_above() -> None:
    """In a separate process: import-linter would silence the loggers of this one."""
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_has_the_layers_of_the_rule() -> None:
    lines = takewhile(lambda line: line.startswith("    "), RULE.split("layers =\n")[1].splitlines())
    layers = [{name.strip(" ()").removeprefix("distcse.") for name in line.split("|")} for line in lines]
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    table = page.split("| layer | contents |")[1].split("\n\n")[0].splitlines()[2:]
    named = [re.findall("`(.*?)`", line.split("|")[1]) for line in table]
    assert [{name.rstrip("/").removesuffix(".py") for name in names} for names in named] == layers
    packages = {name.partition("/")[0] for name in PACKAGE if "/" in name}
    assert packages <= set[str]().union(*layers)


STORAGE = re.compile(
    r"\bos\.(replace|renames?|fsync|fdatasync)\b|\bshutil\.move\b|\bimport hashlib|from (os|shutil|hashlib) import"
    r"|\.rename\(|\.replace\(([^,()]|\([^()]*\))*\)"  # str.replace has two arguments, Path.replace has one
)


def test_only_storage_renames_flushes_and_hashes() -> None:
    """Its order of flush and rename then holds for every file. The seeds of random streams are hashed too, but not stored."""
    found = {name for name, text in PACKAGE.items() if STORAGE.search(text)}
    assert {name for name in found if not name.startswith("storage/")} == {"training/dropout_rng.py"}
    assert {"storage/checksums.py", "storage/atomic_files.py"} <= found
    assert STORAGE.search("a.with_name(n).replace(b(c, d))") and not STORAGE.search("text.replace(a, b)")


NAMES_OF_RAY = {"_create_default_callbacks"}
"""Private names of Ray that distcse overrides; `test_ray_versions.py` tests that they exist."""


def defined(module: str) -> set[str]:
    """Return the private names of functions, classes, attributes and global variables that a module's source defines."""
    names = re.findall(r"(?:def |class |self\.)(_\w+)", module)
    assigned = re.findall(r"^(_[\w, ]+)(?::.*)? = ", module, re.MULTILINE)
    return {name for name in (*names, *re.findall(r"\w+", " ".join(assigned))) if not name.endswith("_")}


def test_tests_use_public_names_and_no_benchmarks() -> None:
    """Tests hold promises of modules, so that what is behind those can change."""
    private = set[str]().union(*map(defined, PACKAGE.values())) - NAMES_OF_RAY
    assert len(private) > 500
    for file in (ROOT / "tests").rglob("*.py"):
        text = file.read_text()
        own = defined(text) | {*re.findall(r"(?:import|as|for) (_\w+)", text)}
        code = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
        lines = [line if "attr(" in line else re.sub(r'"[^"]*"', "", line) for line in code.splitlines()]
        used = {*re.findall(r'(?:\.|import |^ +(?=_\w+,$)|attr\(\w+, ")(_\w+)', "\n".join(lines), re.MULTILINE)}
        assert not used & private - own, file
        assert not re.search(r"^\s*(from|import) benchmarks", text, re.MULTILINE), file
