"""The paired bootstrap, compared with explicit resampling by scipy and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata, spearmanr
from sklearn.metrics import roc_auc_score

from distcse.evaluation import bootstrap
from distcse.evaluation.bootstrap import (
    AucOf,
    AverageOf,
    Fixed,
    MeanOf,
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
    """Return the indices that a row of weights represents."""
    weights: list[np.ndarray] = []
    resample(items, count, lambda block: (weights.append(block), np.zeros(len(block)))[1])
    return np.repeat(np.arange(count), np.concatenate(weights)[number].astype(int))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=20), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_weighted_ranks_equal_scipys_ranks_of_copies(values: list[int], seed: int) -> None:
    weights = np.random.default_rng(seed).integers(0, 3, (1, len(values))).astype(float)
    ranks = weighted_ranks(np.array(values, dtype=float), weights)[0]
    copies = np.repeat(np.arange(len(values)), weights[0].astype(int))
    np.testing.assert_allclose(ranks[copies], rankdata(np.array(values)[copies]))


def test_resampled_scores_equal_scipy_and_scikit_learn() -> None:
    labels = (GOLD > 2).astype(np.int64)
    spearman, auc, mean = SpearmanOf(GOOD, GOLD, "x"), AucOf(GOOD, labels, "x"), MeanOf(GOOD, "x", scale=1)
    assert spearman.value == pytest.approx(100 * spearmanr(GOOD, GOLD).statistic)
    assert auc.value == pytest.approx(100 * roc_auc_score(labels, GOOD))
    for number in (0, 1, 999):
        rows = drawn("x", 60, number)
        assert spearman.resampled[number] == pytest.approx(100 * spearmanr(GOOD[rows], GOLD[rows]).statistic)
        assert auc.resampled[number] == pytest.approx(100 * roc_auc_score(labels[rows], GOOD[rows]))
        assert mean.resampled[number] == pytest.approx(GOOD[rows].mean())


def test_resampling_in_blocks_changes_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, block_sizes = (GOLD > 2).astype(np.int64), []

    def scores() -> list[np.ndarray]:
        return [each.resampled for each in (SpearmanOf(GOOD, GOLD, "x"), AucOf(GOOD, labels, "x"), MeanOf(GOOD, "x"))]

    in_one_block = scores()
    monkeypatch.setattr(bootstrap, "WEIGHTS_PER_BLOCK", 7 * 60 + 1)
    resample("x", 60, lambda block: (block_sizes.append(len(block)), np.zeros(len(block)))[1])
    assert set(block_sizes) == {7, 1000 % 7} and sum(block_sizes) == 1000
    for expected, found in zip(in_one_block, scores(), strict=True):
        np.testing.assert_allclose(expected, found, rtol=1e-12)


def test_difference_is_paired_and_deterministic() -> None:
    good, bad = SpearmanOf(GOOD, GOLD, "x"), SpearmanOf(BAD, GOLD, "x")
    gap, reverse = difference(good, bad), difference(bad, good)
    assert gap is not None and reverse is not None
    assert gap.value == pytest.approx(good.value - bad.value)
    assert gap.low < gap.value < gap.high and gap.is_significant
    assert (reverse.low, reverse.high) == pytest.approx((-gap.high, -gap.low))
    assert difference(SpearmanOf(GOOD, GOLD, "x"), SpearmanOf(BAD, GOLD, "x")) == gap
    same = difference(good, SpearmanOf(3 * GOOD + 1, GOLD, "x"))
    assert same is not None and (same.value, same.low, same.high) == (0, 0, 0) and not same.is_significant


def test_interval_covers_the_true_difference() -> None:
    # The true accuracies differ by exactly 5 points; 95 % intervals should contain it in most of 60 samples.
    covered = 0
    for sample in range(60):
        random = np.random.default_rng(sample)
        ours, theirs = (random.random(400) < 0.8).astype(float), (random.random(400) < 0.75).astype(float)
        gap = difference(MeanOf(ours, f"{sample}"), MeanOf(theirs, f"{sample}"))
        assert gap is not None
        covered += gap.low <= 5 <= gap.high
    assert 52 <= covered <= 60


def test_averages_round_their_parts_and_resample_them_together() -> None:
    parts = [Fixed(1.005), Fixed(2.006)]
    assert AverageOf(parts).value == pytest.approx((round(1.005, 2) + 2.01) / 2)
    assert AverageOf(parts).resampled is None and difference(AverageOf(parts), AverageOf(parts)) is None
    exact = MeanOf(GOOD, "x", scale=1)
    both = AverageOf([exact, exact])
    assert both.resampled is not None
    np.testing.assert_allclose(both.resampled, exact.resampled)
