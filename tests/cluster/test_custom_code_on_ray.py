"""A custom loss term and teacher in the current directory, which Ray's workers import as the driver does."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.recipe import recipe_yaml
from tests.commands import user_environment
from tests.conftest import ROOT
from tests.jobs import make_recipe

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_workers_find_the_modules_of_the_current_directory(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    page = (ROOT / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, code in re.findall(r'```python title="(\w+\.py)"\n(.*?)```', page, re.S):
        (folder / name).write_text(code)
    recipe = make_recipe(
        tmp_path,
        tiny("bert"),
        [tiny("minilm")],
        sentences,
        "objective.custom={correlation: {class_path: 'my_terms:Correlation', weight: 1.0}}",
        "teachers.encoders.0.class_path=my_teachers:Trigrams",
        "teachers.encoders.0.max_length=null",
        "training.workers=1",
        "training.max_steps=6",
    )
    (folder / "recipe.yaml").write_text(recipe_yaml(recipe))
    command = [sys.executable, "-m", "distcse.train", "recipe.yaml"]
    environment = user_environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "correlation 0." in done.stderr and "teacher 0 384 embedded" in done.stderr
