"""Fixtures shared by the unit tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.recipe import Recipe
from tests.jobs import make_recipe
from tests.models import make_cross_encoder


@pytest.fixture(scope="session")
def tiny_cross(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path]) -> Path:
    """A small cross-encoder's folder."""
    return make_cross_encoder(tmp_path_factory.mktemp("tiny-cross"), tiny("bert"))


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Callable[..., Recipe]:
    """Makes the recipe of a small job, with overrides: a student 32 wide, teachers 48 and 32 wide."""
    return lambda *overrides: make_recipe(
        tmp_path, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences, *overrides
    )
