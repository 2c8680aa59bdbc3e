"""Fixtures shared by the unit tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.recipe import Recipe
from tests.jobs import make_recipe


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Callable[..., Recipe]:
    """Makes the recipe of a small job, with overrides: a student 32 wide, teachers 48 and 32 wide."""
    return lambda *overrides: make_recipe(
        tmp_path, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences, *overrides
    )
