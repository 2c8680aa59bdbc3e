"""The first line of every command: before the libraries that take seconds to import, a line says what is being loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.cli.shared import COMMANDS
from distcse.recipe import recipe_yaml
from tests.commands import run_command
from tests.jobs import make_recipe

LOADS = 75
"""Exit status of `UNTIL_LOADING` if the command imports a slow library."""
UNTIL_LOADING = f"""
import os, sys
from importlib.machinery import ModuleSpec

class Stopper:
    def find_spec(self, name, path=None, target=None):
        slow = ("torch", "transformers", "ray", "scipy", "sklearn", "datasets", "pandas", "matplotlib", "optuna")
        return ModuleSpec(name, self) if name in slow else None

    def create_module(self, spec):
        os._exit({LOADS})  # leaves buffered output behind, which a user would not see either

    def exec_module(self, module): ...

sys.meta_path.insert(0, Stopper())
from distcse.cli import main
sys.exit(main())
"""
CALLS = {
    "train": ["RECIPE", "RECIPE --dry-run", "RECIPE training.workers=1", "--resume RUN", "--rerun RUN"],
    "tune": [
        "RECIPE --space SPACE",
        "RECIPE --space SPACE --dry-run",
        "RECIPE --space SPACE --print-space",
        "--resume RUN",
    ],
    "embed": ["RECIPE", "RECIPE --dry-run", "RECIPE --compare", "RECIPE --fit-weights"],
    "pairs": ["sts_unlabelled --data DATA"],
    "recipe": ["ls", "show quickstart", "validate RECIPE", "schema recipe", "reference"],
    "plan": ["RECIPE", "RECIPE --cluster 8xA100-40G"],
    "doctor": ["", "RECIPE"],
    "env": ["", "--constraints"],
    "evaluate": ["MODEL", "MODEL --dry-run"],
    "rank": ["MODEL --corpus TEXT --out OUT"],
    "export": ["MODEL --onnx"],
    "push": ["MODEL --to me/student --dry-run"],
    "completion": ["bash"],
}
WITHOUT_PYTORCH = {"recipe", "push", "completion"}


def until_loading(words: list[str]) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, "-c", UNTIL_LOADING, *words])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_line_comes_before_slow_imports(
    command: str, tiny: Callable[..., Path], sentences: list[str], labelled: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, f"evaluation.data={labelled}")
    file = tmp_path / "mine.yaml"
    file.write_text(recipe_yaml(recipe))
    places = {
        "RECIPE": file,
        "SPACE": "rankcse-listnet",
        "RUN": tmp_path,
        "MODEL": tiny("bert"),
        "TEXT": tmp_path / "corpus.txt",
        "OUT": tmp_path / "out",
        "DATA": labelled,
    }
    for call in CALLS[command]:
        words = [str(places.get(word, word)) for word in call.split()]
        done = until_loading([command, *words])
        assert done.returncode in (0, LOADS), (call, done.stdout + done.stderr)
        if done.returncode == LOADS:
            assert command not in WITHOUT_PYTORCH, call
            assert "loading   PyTorch" in done.stderr, (call, done.stderr)
