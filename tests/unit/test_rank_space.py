"""Rank space against scipy, on random and real vectors, within its memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from distcse.errors import RecipeError
from distcse.events import Steps, Watch
from distcse.student.run import run
from distcse.teachers import RankSpace, inner_products, rank_vectors, serving
from tests.jobs import make_job, make_recipe


def unit(rows: int, width: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_inner_products_are_spearmans() -> None:
    references, vectors = unit(5000, 24), unit(20, 24, seed=1)
    found = RankSpace(references).similarities(vectors)
    expected = spearmanr(vectors @ references.T, axis=1).statistic
    np.testing.assert_allclose(found, expected, atol=1e-6)
    ranks = rank_vectors(vectors @ references.T)
    np.testing.assert_allclose(np.linalg.norm(ranks, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(inner_products(ranks[:3], ranks), found[:3], atol=1e-7)


def test_a_hundred_thousand_references_fit_in_a_gibibyte() -> None:
    references, vectors = unit(100_000, 384), unit(128, 384, seed=1)
    tracemalloc.start()
    found = RankSpace(references).similarities(vectors)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak + references.nbytes < 2**30
    assert np.diagonal(found) == pytest.approx(1, abs=1e-6)
    expected = spearmanr(vectors[0] @ references.T, vectors[1] @ references.T).statistic
    assert found[0, 1] == pytest.approx(expected, abs=1e-6)


def test_a_table_serves_ranks(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("roberta")], sentences, *rank_space(100))
    _, (table,) = make_job(recipe)
    teacher = serving(recipe.teachers.encoders[0], table, seed=3)
    columns = np.arange(24).reshape(2, 12)
    lists = teacher.similarities(columns, slice(4, 8))
    drawn = np.sort(np.random.default_rng(3).permutation(len(sentences))[:100])
    references = table.vectors(drawn)
    for batch, found in zip(columns, lists, strict=True):
        expected = spearmanr(table.vectors(batch) @ references.T, axis=1).statistic
        np.testing.assert_allclose(found, expected[4:8], atol=1e-5)


def rank_space(references: int) -> tuple[str, ...]:
    return ("teachers.encoders.0.space=rank", f"teachers.encoders.0.references={references}")


@pytest.mark.parametrize("combine", ["sum", "hinge"])
def test_rank_encoder_trains(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], combine: str) -> None:
    events: list[Any] = []
    knobs = (
        *rank_space(300),
        "objective.rank=null",
        "objective.consistency=null",
        "objective.rank_regression.weight=30",
        "objective.rank_regression.lower=-0.5",
        "objective.rank_regression.upper=0.9999",
        f"objective.combine={combine}",
        "training.epochs=4",
    )
    result = run(make_recipe(tmp_path, tiny("bert"), [tiny("roberta")], sentences, *knobs), Watch(events.append))
    losses = [event.losses["rank_regression"] for event in events if isinstance(event, Steps)]
    assert losses[-1] < 0.7 * losses[0]
    scores = result.outcome.position.scores
    assert scores[-1][1] > scores[0][1]


def test_rank_lists_need_a_table_and_hinge_its_terms(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    for knobs, told in (
        ((*rank_space(9), "teachers.mode=live"), "serves from a table; write teachers.mode: table"),
        (("objective.combine=hinge",), "hinge is between info_nce and rank_regression"),
        (
            ("objective.rank_regression.lower=0.9", "objective.rank_regression.upper=0.5"),
            "no pair lies between them",
        ),
    ):
        with pytest.raises(RecipeError, match=told):
            make_recipe(tmp_path, tiny("bert"), [tiny("roberta")], sentences, *knobs)
