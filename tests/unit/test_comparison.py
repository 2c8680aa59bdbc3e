"""The comparison of teachers on the user's corpus, the embedding pass, and weights fitted to a labeled dev set."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import kendalltau, spearmanr

from distcse.errors import ComparisonError
from distcse.evaluation import LabelledDev
from distcse.evaluation.tasks.sts import ScoredPairs
from distcse.events import Reporter
from distcse.recipe import Recipe, load_recipe
from distcse.report.terminal import print_comparison
from distcse.runs.distillation.dev_ensemble import DevEnsemble
from distcse.storage import open_store
from distcse.teachers.comparison import compare
from distcse.text import Corpus
from tests.commands import command

main = command("embed")

MakeRecipe = Callable[..., Recipe]


class Planted:
    """A teacher with random vectors of a seed around an offset."""

    def __init__(self, seed: int, offset: int = 0) -> None:
        self._seed, self._offset, self.fingerprint = seed, offset, f"planted {seed} {offset}"

    def encode(self, texts: Sequence[str], **options: Any) -> np.ndarray:
        rows = [np.random.default_rng([self._seed, *text.encode()]).normal(size=6) + self._offset for text in texts]
        return np.stack([row / np.linalg.norm(row) for row in rows]).astype(np.float32)


def planted(seed: int, offset: int = 0) -> str:
    """Return such a teacher as recipes name it."""
    arguments = f"{{seed: {seed}, offset: {offset}}}"
    return f"{{backbone: p{seed}, class_path: 'tests.unit.test_comparison:Planted', kwargs: {arguments}}}"


def test_a_comparison_equals_one_by_hand(
    recipe_with: MakeRecipe,
    sentences: list[str],
    tiny_cross: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two teachers with random vectors follow a cross-encoder: the indices are those of the recipe."""
    recipe = recipe_with(f"teachers.encoders=[{{backbone: '{tiny_cross}'}}, {planted(1)}, {planted(2)}]")
    found = compare(recipe, Corpus.prepare(recipe.corpus, open_store(tmp_path / "cache")), 1000, Reporter())
    assert found.teachers[1:] == ["p1", "p2"] and found.compared == [1, 2] and found.sentences == len(sentences)
    vectors = [Planted(seed).encode(sentences) for seed in (1, 2)]
    lists = [[np.delete(row, index) for index, row in enumerate(units @ units.T)] for units in vectors]
    nearest = [[set(np.argsort(-row)[:10]) for row in one] for one in lists]
    (pairing,) = found.pairings
    assert (pairing.first, pairing.second) == (1, 2)
    taus = [kendalltau(*rows).statistic for rows in zip(*lists, strict=True)]
    assert pairing.kendall == pytest.approx(100 * np.mean(taus), abs=0.05)
    assert pairing.overlap == pytest.approx(np.mean([10 * len(a & b) for a, b in zip(*nearest, strict=True)]), abs=0.05)
    spreads = [np.std([cosine for row in one for cosine in row]) for one in lists]
    for card, one, spread in zip(found.cards, lists, spreads, strict=True):
        assert (card.dimension, card.weight) == (6, 0.5) and card.sentences_per_s > 0
        assert card.statistics.mean == pytest.approx(np.mean(one), abs=1e-5)
        assert card.statistics.spread == pytest.approx(spread, rel=1e-4)
        assert card.effective_weight == pytest.approx(spread / sum(spreads), rel=1e-4)
        assert 5.5 < card.statistics.effective_rank <= 6  # random directions in six dimensions
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


def test_a_comparison_repeats_and_warns_of_a_teacher_that_counts_for_little(
    recipe_with: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_with()
    outputs = []
    for offset in (0, 0, 4):
        teachers = f"teachers.encoders=[{planted(0)}, {planted(1, offset)}]"
        assert main([str(tmp_path / "recipe.yaml"), teachers, "--compare", "--sentences", "60"]) == 0
        captured = capsys.readouterr()
        outputs.append(re.sub(r"(?m) +\d+( +\d+% +\d+%)$", r"\1", captured.out))  # without the cards' speeds
        assert ("DCSE-W02" in captured.err and "teacher 1, p1, has a narrow band" in captured.err) == (offset == 4)
    assert outputs[0] == outputs[1] != outputs[2]
    assert "60 sentences" in outputs[0] and "disagree most" in outputs[0]
    row = next(line for line in outputs[0].splitlines() if line.startswith("teacher 0 and teacher 1"))
    tau, common = (float(cell) for cell in row.split()[-2:])
    assert -100 <= tau < 100 and 0 <= common <= 100
    assert not (tmp_path / "runs").exists() and not (tmp_path / "cache" / "tables").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--compare ONE", ["teachers.encoders has 1"]),
        ("--compare --dry-run ONE", ["teachers.encoders has 1"]),
        ("--compare --sentences 5", ["12 sentences, not 5", "--sentences"]),
        ("--fit-weights --dry-run", ["evaluation.dev=stsb and evaluation.data=FOLDER"]),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: str,
    named: list[str],
    recipe_with: MakeRecipe,
    tiny: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe_with()
    one = f"teachers.encoders=[{{backbone: '{tiny('minilm')}', pooling: mean}}]"
    arguments = [one if word == "ONE" else word for word in words.split()]
    assert main([str(tmp_path / "recipe.yaml"), *arguments]) == 1
    error = capsys.readouterr().err
    assert ComparisonError.code in error and all(text in error for text in named)


def test_fitted_weights_give_each_teacher_its_due() -> None:
    """A good teacher with a narrow band, one with a wide band, and one that guesses."""
    random = np.random.default_rng(0)
    gold = random.uniform(0, 5, 1500)
    texts = [f"sentence {number}" for number in range(1500)]
    dev = LabelledDev((ScoredPairs("planted", texts, texts[::-1], gold, np.array([""] * 1500)),))
    noise = random.standard_normal((3, 1500))
    signal = (gold - gold.mean()) / gold.std()
    cosines = np.stack([0.8 + 0.02 * (signal + noise[0]), 0.1 * (signal + noise[1]), 0.1 * noise[2]])
    ensemble = DevEnsemble(dev, cosines, [0.03, 0.14, 0.1])
    equal = [1.0, 1.0, 1.0]
    assert ensemble.score(equal) == pytest.approx(100 * spearmanr(cosines.sum(axis=0), gold).statistic)
    useful, wide, guessing = ensemble.losses_without(equal)
    assert wide > useful > 0 > guessing
    fitted = ensemble.fit(equal)
    assert sum(fitted) == pytest.approx(3) and fitted[0] / fitted[1] == pytest.approx(5, rel=0.3)
    assert fitted[2] < 0.05 * fitted[1]
    assert ensemble.score(fitted) > ensemble.score([5, 1, 1]) > ensemble.score(equal)


def test_weights_are_fitted_on_vectors_that_an_embedding_pass_cached(
    recipe_with: MakeRecipe, tmp_path: Path, labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_with()
    assert main([str(tmp_path / "recipe.yaml")]) == 0
    first = capsys.readouterr()
    assert first.out.count("table ") == 2 and "384 embedded, 0 reused" in first.err
    assert not (tmp_path / "runs").exists()
    arguments = [str(tmp_path / "recipe.yaml"), f"evaluation.data={labelled}"]
    assert main([*arguments, "--compare", "--sentences", "60"]) == 0
    output = capsys.readouterr().out
    assert "without a student" in output and "sentences/s" in output and "fitted" not in output
    tables = sorted((tmp_path / "cache" / "tables").rglob("*.npy"))
    written = [file.stat().st_mtime_ns for file in tables]
    assert main([*arguments, "--fit-weights", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])
    recipes, balanced, fitted = scores["weightings"]
    assert scores["event"] == "EnsembleScores" and fitted["score"] >= balanced["score"]
    assert recipes["alphas"] == pytest.approx([2 / 3, 4 / 3])
    assert [file.stat().st_mtime_ns for file in tables] == written  # nothing was embedded again
    assert main([*arguments, "--fit-weights"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (overrides,) = (line for line in lines if line.startswith("teachers.encoders.0.alpha="))
    encoders = load_recipe(arguments[0], overrides.split()).teachers.encoders
    assert [teacher.alpha for teacher in encoders] == pytest.approx(fitted["alphas"], rel=0.01)
