"""The paired bootstrap against resampling by hand, with scipy and scikit-learn on every resample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata, spearmanr
from sklearn.metrics import roc_auc_score

from distcse.evaluation import estimates
from distcse.evaluation.estimates import (
    AucOf,
    AverageOf,
    Fixed,
    MeanOf,
    ReportedEstimate,
    SpearmanOf,
    difference,
    resample,
    weighted_ranks,
)

generator = np.random.default_rng(0)
GOLD = generator.integers(0, 6, 60).astype(float)
GOOD = GOLD + generator.normal(size=60)
BAD = GOLD + 4 * generator.normal(size=60)


def drawn(items: str, count: int, number: int) -> np.ndarray:
    """Indices that a row of weights stands for."""
    weights: list[np.ndarray] = []
    resample(items, count, lambda some: (weights.append(some), np.zeros(len(some)))[1])
    return np.repeat(np.arange(count), np.concatenate(weights)[number].astype(int))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=20), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_weighted_ranks_are_scipys_on_the_copies(values: list[int], seed: int) -> None:
    weights = np.random.default_rng(seed).integers(0, 3, (1, len(values))).astype(float)
    ranks = weighted_ranks(np.array(values, dtype=float), weights)[0]
    copies = np.repeat(np.arange(len(values)), weights[0].astype(int))
    np.testing.assert_allclose(ranks[copies], rankdata(np.array(values)[copies]))


def test_resampled_figures_are_those_of_the_libraries() -> None:
    labels = (GOLD > 2).astype(np.int64)
    spearman, auc, mean = SpearmanOf(GOOD, GOLD, "x"), AucOf(GOOD, labels, "x"), MeanOf(GOOD, "x", scale=1)
    assert spearman.value == pytest.approx(100 * spearmanr(GOOD, GOLD).statistic)
    assert auc.value == pytest.approx(100 * roc_auc_score(labels, GOOD))
    for number in (0, 1, 999):
        rows = drawn("x", 60, number)
        assert spearman.resampled[number] == pytest.approx(100 * spearmanr(GOOD[rows], GOLD[rows]).statistic)
        assert auc.resampled[number] == pytest.approx(100 * roc_auc_score(labels[rows], GOOD[rows]))
        assert mean.resampled[number] == pytest.approx(GOOD[rows].mean())


def test_many_items_are_resampled_a_few_times_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike, and in the memory of a few."""
    labels, seen = (GOLD > 2).astype(np.int64), []

    def figures() -> list[np.ndarray]:
        return [one.resampled for one in (SpearmanOf(GOOD, GOLD, "x"), AucOf(GOOD, labels, "x"), MeanOf(GOOD, "x"))]

    whole = figures()
    monkeypatch.setattr(estimates, "_WEIGHTS_AT_A_TIME", 7 * 60 + 1)
    resample("x", 60, lambda some: (seen.append(len(some)), np.zeros(len(some)))[1])
    assert set(seen) == {7, 1000 % 7} and sum(seen) == 1000
    for one, other in zip(whole, figures(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_difference_is_paired_and_the_same_every_time() -> None:
    good, bad = SpearmanOf(GOOD, GOLD, "x"), SpearmanOf(BAD, GOLD, "x")
    apart, back = difference(good, bad), difference(bad, good)
    assert apart is not None and back is not None
    assert apart.value == pytest.approx(good.value - bad.value)
    assert apart.low < apart.value < apart.high and apart.clear
    assert (back.low, back.high) == pytest.approx((-apart.high, -apart.low))
    assert difference(SpearmanOf(GOOD, GOLD, "x"), SpearmanOf(BAD, GOLD, "x")) == apart
    same = difference(good, SpearmanOf(3 * GOOD + 1, GOLD, "x"))
    assert same is not None and (same.value, same.low, same.high) == (0, 0, 0) and not same.clear


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    # Two raters that differ by exactly 5 points of accuracy in truth; 95 % intervals should hold it in most of 60 worlds.
    held = 0
    for world in range(60):
        random = np.random.default_rng(world)
        ours, theirs = (random.random(400) < 0.8).astype(float), (random.random(400) < 0.75).astype(float)
        apart = difference(MeanOf(ours, f"{world}"), MeanOf(theirs, f"{world}"))
        assert apart is not None
        held += apart.low <= 5 <= apart.high
    assert 52 <= held <= 60


def test_averages_round_first_and_resample_together() -> None:
    parts = [Fixed(1.005), Fixed(2.006)]
    assert AverageOf(parts).value == pytest.approx((round(1.005, 2) + 2.01) / 2)
    assert AverageOf(parts).resampled is None and difference(AverageOf(parts), AverageOf(parts)) is None
    exact = MeanOf(GOOD, "x", scale=1)
    reported = ReportedEstimate(9.0, exact)
    assert reported.value == 9.0 and reported.resampled is not None
    np.testing.assert_array_equal(reported.resampled, exact.resampled)
    both = AverageOf([exact, reported])
    assert both.resampled is not None
    np.testing.assert_allclose(both.resampled, exact.resampled)
