"""The permutation by position: each number once, without a pattern, and the same on every platform."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from distcse.text.sampler import Permutation

BILLION = 10**9


def spread(values: NDArray[np.int64], size: int, bins: int) -> float:
    """Return how far values are from an even spread over 0 to size - 1: chi-square, in standard deviations from its mean."""
    counts = np.bincount(values * bins // size, minlength=bins)
    expected = len(values) / bins
    return float((((counts - expected) ** 2 / expected).sum() - (bins - 1)) / np.sqrt(2 * (bins - 1)))


@pytest.mark.parametrize("key", [(0, 0), (42, 7)])
def test_each_number_occurs_once(key: tuple[int, int]) -> None:
    for size in (*range(1, 300), 2**16, 2**16 + 1, 99_999):
        assert np.array_equal(np.sort(Permutation(size, key)(np.arange(size))), np.arange(size))


@pytest.mark.parametrize("size", [BILLION, 2**32, 2**62])
def test_no_number_occurs_twice_in_a_sample_of_many_positions(size: int) -> None:
    positions = np.unique(np.random.default_rng(0).integers(0, size, 50_000))
    found = Permutation(size, [42, 0])(np.concatenate([positions, [size - 1]]))
    assert found.dtype == np.int64 and found.min() >= 0 and found.max() < size
    assert len(np.unique(found)) == len(np.unique([*positions.tolist(), size - 1]))


def test_numbers_do_not_depend_on_their_positions() -> None:
    for seed in range(5):
        found = Permutation(BILLION, [seed, 0])(np.arange(100_000))
        assert abs(spread(found, BILLION, 1000)) < 4
        assert abs(spread(np.diff(found) % BILLION, BILLION, 1000)) < 4  # of neighboring positions
        assert abs(spread((found[7:] - found[:-7]) % BILLION, BILLION, 1000)) < 4
        assert abs(spread(found % 31, 31, 31)) < 4
        following = Permutation(BILLION, [seed, 1])(np.arange(100_000))
        assert abs(spread((following - found) % BILLION, BILLION, 1000)) < 4  # of another epoch


def test_the_first_positions_are_spread_evenly_over_seeds() -> None:
    for size in (101, BILLION):
        first = np.array([Permutation(size, [seed, 3])(np.arange(2)) for seed in range(1000)])
        assert abs(spread(first[:, 0], size, 20)) < 4 and abs(spread(first[:, 1], size, 20)) < 4


def test_numbers_are_stable_between_platforms_and_releases() -> None:
    assert Permutation(BILLION, [42, 0])(np.array([0, 1, 2, BILLION - 1])).tolist() == [
        663815041,
        994732716,
        956374099,
        76626551,
    ]
    assert Permutation(10, [1, 2])(np.arange(10)).tolist() == [7, 6, 9, 0, 2, 4, 1, 3, 8, 5]


def test_memory_is_that_of_the_positions() -> None:
    tracemalloc.start()
    Permutation(BILLION, [42, 0])(np.arange(1000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000


def test_negative_keys_are_errors() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        Permutation(10, [1, -1])
