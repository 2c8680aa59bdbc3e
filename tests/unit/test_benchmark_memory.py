"""What says that memory is flat says so of what is flat alone."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from benchmarks.load import allowance, deepest
from benchmarks.memory import MIB, Course, MemoryWatch


def course(late: float, early: float = 0.0) -> Course:
    """100 MiB that gain so many MiB in the first and in the second half of a minute, with some noise."""
    seconds = np.linspace(0, 60, 121)
    gained = np.interp(seconds, [0, 30, 60], [0, early, early + late])
    noise = np.random.default_rng(0).normal(0, 0.5, len(seconds))
    return Course(seconds.tolist(), (MIB * (100 + gained + noise)).tolist())


def test_only_the_second_half_counts() -> None:
    for late, early, flat in ((0, 0, True), (0, 80, True), (6, 0, False), (-6, 0, True), (1, 0, True)):
        grown = course(late, early)
        assert grown.growth() / MIB == pytest.approx(late, abs=0.5)
        assert (grown.growth() <= allowance(grown)) == flat


def test_a_process_that_keeps_what_it_is_given_is_seen() -> None:
    kept, given = [], [0.0]
    with MemoryWatch({"this": os.getpid()}, {"gauge": lambda: given[0]}, period=0.02) as watch:
        for _ in range(40):
            kept.append(np.ones(MIB, dtype=np.uint8))
            given[0] += MIB
            time.sleep(0.02)
    for grown in (watch.courses["this"]["private"], watch.courses["gauge"]["used"]):
        assert 10 * MIB < grown.growth() < 30 * MIB
        assert max(grown.amounts) - grown.amounts[0] > 30 * MIB
    assert len(kept) == 40


def test_a_look_that_fails_is_told() -> None:
    gone = 2**22 + 1  # beyond the largest process id
    with pytest.raises(FileNotFoundError), MemoryWatch({"gone": gone}, {}, period=0.01):
        time.sleep(0.05)


def test_open_questions_are_counted_at_every_moment() -> None:
    assert deepest(np.array([[0.0, 1.0, 2.0], [1.5, 1.7, 3.0]])) == 2
    assert deepest(np.array([[0.0, 0.1, 0.2], [9.0, 9.1, 9.2]])) == 3
