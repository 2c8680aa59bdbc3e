"""The layer rule of docs/explanation/architecture.md, as `.importlinter` states it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("importlinter", reason="import-linter is not installed")


def broken(config: Path) -> str:
    """What import-linter says of a broken contract; empty where it is kept. It would silence the loggers of this process."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
    environment = {**os.environ, "PYTHONPATH": str(config.parent)}
    done = subprocess.run(
        [*command, "--config", str(config), "--no-cache"], capture_output=True, text=True, env=environment
    )
    return done.stdout + done.stderr if done.returncode else ""


def write_package(folder: Path) -> list[str]:
    """Write a copy of the contracts for a package whose layers are empty, and return the layers' names."""
    rule = (ROOT / ".importlinter").read_text()
    (folder / "rule").write_text(rule.replace("distcse", "package"))
    names = sorted(set[str]().union(*layers_of(rule)))
    for name in names:
        (folder / "package" / name).mkdir(parents=True)
        (folder / "package" / name / "__init__.py").touch()
    (folder / "package" / "__init__.py").touch()
    return names


def test_no_module_imports_from_a_layer_above() -> None:
    assert not broken(ROOT / ".importlinter")


def test_the_rule_would_see_it(tmp_path: Path) -> None:
    """The same contract fails for a package in which a lower layer imports a higher one."""
    write_package(tmp_path)
    assert not broken(tmp_path / "rule")
    (tmp_path / "package" / "recipe" / "__init__.py").write_text("import package.report\n")
    assert "package.recipe is not allowed to import package.report" in broken(tmp_path / "rule")


def test_the_rule_would_see_an_import_of_ray(tmp_path: Path) -> None:
    """`cluster` may import Ray, and other packages may import `cluster`'s users; none may import Ray itself."""
    layers = write_package(tmp_path)
    assert "cluster" in layers and "tuning" in layers
    (tmp_path / "package" / "cluster" / "tune.py").write_text("import ray\n")
    (tmp_path / "package" / "api" / "__init__.py").write_text("import package.cluster.tune\n")
    assert not broken(tmp_path / "rule")
    (tmp_path / "package" / "tuning" / "__init__.py").write_text("from ray import tune\n")
    assert "package.tuning -> ray" in broken(tmp_path / "rule")


def layers_of(rule: str) -> list[set[str]]:
    """Return the names in each layer of the contracts, from top to bottom."""
    lines = takewhile(lambda line: line.startswith("    "), rule.split("layers =\n")[1].splitlines())
    return [{name.strip(" ()").removeprefix("distcse.") for name in line.split("|")} for line in lines]


def test_the_page_has_the_layers_of_the_rule() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    table = page.split("| layer | contents |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [
        {name.rstrip("/").removesuffix(".py") for name in re.findall("`(.*?)`", line.split("|")[1])} for line in table
    ]
    assert rows == layers_of((ROOT / ".importlinter").read_text())
    packages = {entry.name for entry in (ROOT / "distcse").iterdir() if (entry / "__init__.py").is_file()}
    assert packages - {"recipes"} <= set[str]().union(*rows)


STORAGE_CALLS = {"os.replace", "os.rename", "os.renames", "os.fsync", "os.fdatasync", "shutil.move"}
"""Calls that only `distcse.storage` makes, so that its order of flush and rename holds for every file."""
HASHES = {"training/dropout_rng.py"}
"""Modules that use hashlib outside `distcse.storage`: seeds of random streams, which are not stored."""


def storage_calls(module: Path, name: str) -> list[str]:
    """Return the lines of a module that rename, flush or hash."""
    found = []
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            origin = node.module if isinstance(node, ast.ImportFrom) else None
            hashes = "hashlib" in (*names, origin) and name not in HASHES
            hidden = {f"{origin}.{imported}" for imported in names} & STORAGE_CALLS
            if hashes or hidden:
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # str.replace has two arguments, Path.replace has one.
            path_replace = node.func.attr == "replace" and len(node.args) == 1 and not node.keywords
            if ast.unparse(node.func) in STORAGE_CALLS or path_replace or node.func.attr == "rename":
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_only_storage_renames_flushes_and_hashes() -> None:
    modules = {file.relative_to(ROOT / "distcse").as_posix(): file for file in (ROOT / "distcse").rglob("*.py")}
    outside = {name: file for name, file in modules.items() if not name.startswith("storage/")}
    assert not [line for name, file in outside.items() for line in storage_calls(file, name)]
    assert outside.keys() >= HASHES


@pytest.mark.parametrize(
    "line",
    [
        "os.replace(a, b)",
        "os.fsync(3)",
        "from os import rename",
        "shutil.move(a, b)",
        "a.rename(b)",
        "a.with_name(n).replace(b)",
        "import hashlib",
        "from hashlib import sha256",
    ],
)
def test_the_check_of_renames_would_see_it(tmp_path: Path, line: str) -> None:
    (tmp_path / "module.py").write_text(f"{line}\n")
    assert storage_calls(tmp_path / "module.py", "module.py") == [f"module.py:1: {line}"]
    (tmp_path / "module.py").write_text("text.replace(a, b)\nreplace(trial, x=1)\nimport os\n")
    assert not storage_calls(tmp_path / "module.py", "module.py")


def private_names(tree: ast.AST) -> set[str]:
    """Return the private names that a module defines: of functions, classes, variables and attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.endswith("_")}


def borrowed_names(module: str, of_package: set[str]) -> list[str]:
    """Return the private names of a package that a module imports, reads, sets or patches, with their lines."""
    found: list[tuple[int, str]] = []
    if of_package.isdisjoint(re.findall(r"\b_\w+", module)):  # most modules, which need no syntax tree
        return []
    tree = ast.parse(module)
    of_package = of_package - private_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found += [(node.lineno, alias.name) for alias in node.names if alias.name in of_package]
        elif isinstance(node, ast.Attribute) and node.attr in of_package:
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("getattr", "setattr", "delattr")):
            words = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            found += [(node.lineno, word) for word in words if word.rpartition(".")[2] in of_package]
    return [f"{line}: {name}" for line, name in found]


NAMES_OF_RAY = {"_create_default_callbacks"}
"""Private names of Ray that distcse overrides; `test_ray_versions.py` tests that they exist."""


def test_tests_use_public_names_and_no_benchmarks() -> None:
    """Tests hold promises of modules, so that what is behind those can change."""
    package = [ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "distcse").rglob("*.py")]
    names = set[str]().union(*map(private_names, package)) - NAMES_OF_RAY
    assert len(names) > 500
    for file in (ROOT / "tests").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert not borrowed_names(text, names), file
        assert not re.search(r"^\s*(from|import) benchmarks", text, re.MULTILINE), file


@pytest.mark.parametrize(
    "line",
    [
        "from distcse.pairs import _tasks",
        "module._tasks()",
        "module._tasks = 3",
        "model.part._tasks.clear()",
        'setattr(module, "_tasks", 3)',
        'monkeypatch.setattr("distcse.pairs._tasks", 3)',
    ],
)
def test_the_check_of_private_names_would_see_it(line: str) -> None:
    assert len(borrowed_names(f"\n{line}\n", {"_tasks"})) == 1
    assert not borrowed_names(f"_tasks = 1\n{line}\n", {"_tasks"})
    assert not borrowed_names("module.tasks()\n", {"_tasks"})
