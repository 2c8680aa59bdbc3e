"""The choice of a run's backend, and what the choice imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.cluster.backend import RayBackend, choose_backend
from distcse.recipe import Recipe
from distcse.runs.backend import LocalBackend
from tests.pairs import make_mutual_recipe


def test_the_recipe_selects_the_backend(
    recipe_with: Callable[..., Recipe], tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    models = {"one": tiny("bert")}
    local = [recipe_with("training.workers=0"), make_mutual_recipe(tmp_path, models, sentences, "ray=false")]
    on_ray = [recipe_with("training.workers=1"), make_mutual_recipe(tmp_path, models, sentences, "ray=true")]
    assert [type(choose_backend(recipe)) for recipe in local] == [LocalBackend, LocalBackend]
    assert [type(choose_backend(recipe)) for recipe in on_ray] == [RayBackend, RayBackend]
    assert choose_backend(local[0]).cluster is None and choose_backend(on_ray[0]).cluster is not None


def test_choosing_a_backend_does_not_import_ray() -> None:
    """Ray reads its variables when it is imported, after `start_ray` has set them; a run without Ray needs none of it."""
    script = "import distcse.api, distcse.cluster.sweep, sys; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_what_the_trainers_controller_imports_is_light() -> None:
    """Ray Train's controller imports this module before it requests workers. Ray itself imports PyTorch there."""
    script = """
import sys
import distcse.cluster.train_workers
heavy = [name for name in ("transformers", "distcse.models", "distcse.teachers.kinds") if name in sys.modules]
sys.exit(", ".join(heavy) or 0)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
