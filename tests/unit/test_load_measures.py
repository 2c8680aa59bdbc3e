"""The load test's measures: growth of memory, and requests in flight."""

from __future__ import annotations

import mmap
import os
import time

import numpy as np
import pytest

from tests.load import Load, LoadResult, TrialLoad, deepest
from tests.memory import MIB, MemorySeries, MemoryWatch


def series(late: float, early: float = 0.0) -> MemorySeries:
    """100 MiB that grow by `early` and `late` MiB in the first and second half of a minute, with some noise."""
    seconds = np.linspace(0, 60, 121)
    gained = np.interp(seconds, [0, 30, 60], [0, early, early + late])
    noise = np.random.default_rng(0).normal(0, 0.5, len(seconds))
    return MemorySeries(seconds.tolist(), (MIB * (100 + gained + noise)).tolist())


def result(server: MemorySeries, trial: MemorySeries, store: MemorySeries) -> LoadResult:
    """1,000 answers of 256 KiB, 250 MiB in all, from two servers to two trials, with these memory series."""
    times = np.tile(np.linspace(0, 60, 250), (2, 2, 1))
    load = Load(teachers=2, trials=2, batch=64, block_steps=16)
    trials = [TrialLoad(times + np.array([0, 0.1])[:, None, None], 0.0, 250, 1.0)] * 2
    memory = {"server 0.0": {"private": server}, "trial 1": {"private": trial}, "object store": {"used": store}}
    return LoadResult(load, trials, 60.0, memory)


@pytest.mark.parametrize(("late", "early"), [(0, 0), (0, 80), (6, 0), (-6, 0), (1, 0)])
def test_only_the_second_half_counts(late: float, early: float) -> None:
    assert series(late, early).growth() / MIB == pytest.approx(late, abs=0.5)


def test_a_leak_of_more_than_one_answer_in_a_hundred_is_a_problem() -> None:
    flat = series(0, early=80)
    assert result(flat, flat, flat).problems() == []
    # The second half passes 125 MiB, 62 of them by each server and trial; 2 MiB are free.
    assert result(series(1), series(1.5), series(1)).problems() == []
    problems = result(series(3), flat, series(30)).problems()
    assert [line.split(" grew by ")[0] for line in problems] == ["server 0.0, private", "object store, used"]
    assert result(flat, series(5), flat).problems()[0].startswith("trial 1, private grew by ")


def test_growth_of_a_process_and_of_a_gauge_is_measured() -> None:
    pages, gauge = [], [0.0]
    with MemoryWatch({"this": os.getpid()}, {"gauge": lambda: gauge[0]}, period=0.02) as memory:
        for _ in range(40):
            pages.append(mmap.mmap(-1, MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))  # new pages, none that were freed
            pages[-1].write(b"1" * MIB)
            gauge[0] += MIB
            time.sleep(0.02)
    for one in (memory.series["this"]["private"], memory.series["gauge"]["used"]):
        assert 10 * MIB < one.growth() < 30 * MIB
        assert max(one.amounts) - one.amounts[0] > 30 * MIB
    assert len(pages) == 40


def test_an_error_of_a_sample_is_raised() -> None:
    gone = 2**22 + 1  # beyond the largest process id
    with pytest.raises(FileNotFoundError), MemoryWatch({"gone": gone}, {}, period=0.01):
        time.sleep(0.05)


def test_the_largest_number_of_requests_in_flight_is_counted() -> None:
    assert deepest(np.array([[0.0, 1.0, 2.0], [1.5, 1.7, 3.0]])) == 2
    assert deepest(np.array([[0.0, 0.1, 0.2], [9.0, 9.1, 9.2]])) == 3
