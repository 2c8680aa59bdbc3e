"""The comparison of teachers on the user's corpus, and the embedding pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kendalltau

from distcse.data import Corpus
from distcse.embed import main
from distcse.errors import ComparisonError
from distcse.recipe import Recipe
from distcse.report.terminal import print_comparison
from distcse.teachers.comparison import compare, kendall, overlap

MakeRecipe = Callable[..., Recipe]


def test_measures_by_hand() -> None:
    one = np.array([[0.9, 0.8, 0.1, 0.0], [0.1, 0.2, 0.3, 0.4]])
    other = np.array([[0.9, 0.1, 0.8, 0.0], [0.4, 0.3, 0.2, 0.1]])
    assert kendall(one, one) == pytest.approx(100) and kendall(one, other) == pytest.approx(100 * (2 / 3 - 1) / 2)
    assert overlap(one, other, nearest=2) == pytest.approx(25)  # one of two in common, and none of two


def test_a_comparison_on_the_users_corpus(
    recipe_with: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_with()
    assert main([str(tmp_path / "recipe.yaml"), "--compare", "--sentences", "60"]) == 0
    output = capsys.readouterr().out
    assert "60 sentences" in output and "teacher 0 and teacher 1" in output
    row = next(line for line in output.splitlines() if line.startswith("teacher 0 and teacher 1"))
    tau, common = (float(cell) for cell in row.split()[-2:])
    assert -100 <= tau < 100 and 0 <= common <= 100
    assert "disagree most" in output
    assert main([str(tmp_path / "recipe.yaml"), "--compare", "--sentences", "60"]) == 0
    assert capsys.readouterr().out == output
    assert not (tmp_path / "runs").exists() and not (tmp_path / "cache" / "tables").exists()


PLANTED = """
import numpy as np
class Planted:
    def __init__(self, seed):
        self.seed, self.fingerprint = seed, f"planted {seed}"
    def encode(self, texts, **how):
        rows = [np.random.default_rng([self.seed, *text.encode()]).normal(size=6) for text in texts]
        return np.stack([row / np.linalg.norm(row) for row in rows]).astype(np.float32)
"""


def test_a_comparison_equals_one_by_hand(
    recipe_with: MakeRecipe,
    sentences: list[str],
    tiny_cross: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two teachers with random vectors follow a cross-encoder: the indices are those of the recipe."""
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    custom = "{backbone: p%d, class_path: 'planted:Planted', kwargs: {seed: %d}}"
    recipe = recipe_with(f"teachers.encoders=[{{backbone: '{tiny_cross}'}}, {custom % (1, 1)}, {custom % (2, 2)}]")
    found = compare(recipe, Corpus.prepare(recipe.corpus, tmp_path / "cache"), 1000, lambda number, done: None)
    assert found.teachers[1:] == ["p1", "p2"] and found.compared == [1, 2] and found.sentences == len(sentences)
    from planted import Planted

    vectors = [Planted(seed).encode(sentences) for seed in (1, 2)]
    lists = [[np.delete(row, index) for index, row in enumerate(units @ units.T)] for units in vectors]
    nearest = [[set(np.argsort(-row)[:10]) for row in one] for one in lists]
    (pairing,) = found.pairings
    assert (pairing.first, pairing.second) == (1, 2)
    assert pairing.kendall == pytest.approx(
        100 * np.mean([kendalltau(*rows).statistic for rows in zip(*lists, strict=True)]), abs=0.05
    )
    assert pairing.overlap == pytest.approx(np.mean([10 * len(a & b) for a, b in zip(*nearest, strict=True)]), abs=0.05)
    indices = {text: index for index, text in enumerate(sentences)}
    standardized = [(np.array(one) - np.mean(one)) / np.std(one) for one in lists]
    difference = np.abs(standardized[0] - standardized[1])
    row, column = np.unravel_index(int(difference.argmax()), difference.shape)
    largest = found.disagreements[0]
    assert {indices[largest.one], indices[largest.other]} == {row, column + (column >= row)}
    for cosine, units in zip(largest.cosines, vectors, strict=True):
        assert cosine == pytest.approx(float(units[indices[largest.one]] @ units[indices[largest.other]]), abs=1e-6)
    texts = [text for disagreement in found.disagreements for text in (disagreement.one, disagreement.other)]
    assert len(found.disagreements) == 5 and len(set(texts)) == len(texts)
    print_comparison(found)
    output = capsys.readouterr().out
    assert "teacher 1  p1" in output and "teacher 1 and teacher 2" in output and "teacher 0" not in output


def test_a_dry_run_of_a_comparison(
    recipe_with: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny: Callable[..., Path]
) -> None:
    recipe_with()
    arguments = [str(tmp_path / "recipe.yaml"), "--compare", "--dry-run"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "comparison" in captured.out and "to be embedded" not in captured.err
    teacher = f"teachers.encoders=[{{backbone: '{tiny('minilm')}', pooling: mean}}]"
    assert main([*arguments, teacher]) == 1
    error = capsys.readouterr().err
    assert ComparisonError.code in error and "teachers.encoders has 1" in error
    assert main([*arguments[:2], "--sentences", "5"]) == 1
    error = capsys.readouterr().err
    assert ComparisonError.code in error and "12 sentences, not 5" in error and "--sentences" in error


def test_a_comparison_needs_two_teachers(
    recipe_with: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny: Callable[..., Path]
) -> None:
    recipe_with()
    teacher = f"teachers.encoders=[{{backbone: '{tiny('minilm')}', pooling: mean}}]"
    assert main([str(tmp_path / "recipe.yaml"), teacher, "--compare"]) == 1
    error = capsys.readouterr().err
    assert ComparisonError.code in error and "teachers.encoders has 1" in error


def test_the_embedding_pass_completes_the_tables(
    recipe_with: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_with()
    assert main([str(tmp_path / "recipe.yaml")]) == 0
    first = capsys.readouterr()
    assert first.out.count("table ") == 2 and "384 embedded, 0 reused" in first.err
    assert main([str(tmp_path / "recipe.yaml")]) == 0
    assert "0 embedded, 384 reused" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
