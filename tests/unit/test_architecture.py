"""The layer rule of docs/explanation/architecture.md, as `.importlinter` states it."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_no_module_imports_from_a_floor_above() -> None:
    assert not broken(ROOT / ".importlinter")


def test_the_rule_would_see_it(tmp_path: Path) -> None:
    """The same contract fails for a package in which a lower layer imports a higher one."""
    rule = (ROOT / ".importlinter").read_text().replace("distcse", "house")
    (tmp_path / "rule").write_text(rule)
    floors = [line.strip() for line in rule.split("layers =")[1].split("\n\n")[0].splitlines() if line.strip()]
    for name in (part.strip(" ()").removeprefix("house.") for floor in floors for part in floor.split("|")):
        (tmp_path / "house" / name).mkdir(parents=True)
        (tmp_path / "house" / name / "__init__.py").touch()
    (tmp_path / "house" / "__init__.py").touch()
    assert not broken(tmp_path / "rule")
    (tmp_path / "house" / "recipe" / "__init__.py").write_text("import house.report\n")
    assert "house.recipe is not allowed to import house.report" in broken(tmp_path / "rule")


def test_the_page_names_every_room() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    rooms = [entry.name for entry in (ROOT / "distcse").iterdir() if (entry / "__init__.py").is_file()]
    assert not [room for room in rooms if f"`{room}/`" not in page and room != "recipes"]
