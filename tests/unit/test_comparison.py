"""The preview of teachers on the user's own text, and the pass that embeds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from distcse.embed import main
from distcse.recipe import Recipe
from distcse.teachers.comparison import kendall, overlap

MakeRecipe = Callable[..., Recipe]


def test_measures_by_hand() -> None:
    one = np.array([[0.9, 0.8, 0.1, 0.0], [0.1, 0.2, 0.3, 0.4]])
    other = np.array([[0.9, 0.1, 0.8, 0.0], [0.4, 0.3, 0.2, 0.1]])
    assert kendall(one, one) == pytest.approx(100) and kendall(one, other) == pytest.approx(100 * (2 / 3 - 1) / 2)
    assert overlap(one, other, nearest=2) == pytest.approx(25)  # one of two in common, and none of two


def test_a_preview_on_the_users_text(
    recipe_with: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_with()
    assert main([str(tmp_path / "recipe.yaml"), "--compare", "--sentences", "60"]) == 0
    told = capsys.readouterr().out
    assert "Agreement on 60 sentences" in told and "teacher 0 and teacher 1" in told
    row = next(line for line in told.splitlines() if line.startswith("teacher 0 and teacher 1"))
    tau, common = (float(cell) for cell in row.split()[-2:])
    assert -100 <= tau < 100 and 0 <= common <= 100
    assert "farthest apart" in told
    assert main([str(tmp_path / "recipe.yaml"), "--compare", "--sentences", "60"]) == 0
    assert capsys.readouterr().out == told
    assert not (tmp_path / "runs").exists() and not (tmp_path / "cache" / "tables").exists()


def test_one_teacher_has_nobody_to_agree_with(
    recipe_with: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny: Callable[..., Path]
) -> None:
    recipe_with()
    teacher = f"teachers.encoders=[{{backbone: '{tiny('minilm')}', pooling: mean}}]"
    assert main([str(tmp_path / "recipe.yaml"), teacher, "--compare"]) == 1
    assert "wants two teachers that give vectors, the recipe has 1" in capsys.readouterr().err


def test_the_pass_alone_fills_the_tables(
    recipe_with: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_with()
    assert main([str(tmp_path / "recipe.yaml")]) == 0
    first = capsys.readouterr()
    assert first.out.count("table ") == 2 and "384 embedded, 0 reused" in first.err
    assert main([str(tmp_path / "recipe.yaml")]) == 0
    assert "0 embedded, 384 reused" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
