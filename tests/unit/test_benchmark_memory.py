"""What says that memory is flat says so of what is flat alone."""

from __future__ import annotations

import mmap
import os
import time

import numpy as np
import pytest

from benchmarks.load import Asked, Found, Load, deepest
from benchmarks.memory import MIB, Course, MemoryWatch


def course(late: float, early: float = 0.0) -> Course:
    """100 MiB that grow by `early` and `late` MiB in the first and second half of a minute, with some noise."""
    seconds = np.linspace(0, 60, 121)
    gained = np.interp(seconds, [0, 30, 60], [0, early, early + late])
    noise = np.random.default_rng(0).normal(0, 0.5, len(seconds))
    return Course(seconds.tolist(), (MIB * (100 + gained + noise)).tolist())


def found(server: Course, trial: Course, store: Course) -> Found:
    """1,000 answers of 256 KiB, 250 MiB in all, given by two servers to two trials; what they weighed meanwhile."""
    times = np.tile(np.linspace(0, 60, 250), (2, 2, 1))
    load = Load(teachers=2, trials=2, batch=64, block_steps=16)
    asked = [Asked(times + np.array([0, 0.1])[:, None, None], 0.0, 250, 1.0)] * 2
    courses = {"server 0.0": {"private": server}, "trial 1": {"private": trial}, "object store": {"used": store}}
    return Found(load, asked, 60.0, courses)


@pytest.mark.parametrize(("late", "early"), [(0, 0), (0, 80), (6, 0), (-6, 0), (1, 0)])
def test_only_the_second_half_counts(late: float, early: float) -> None:
    assert course(late, early).growth() / MIB == pytest.approx(late, abs=0.5)


def test_who_keeps_more_than_one_answer_in_a_hundred_is_named() -> None:
    flat = course(0, early=80)
    assert found(flat, flat, flat).wrong() == []
    # The second half passes 125 MiB, 62 of them by each server and trial; 2 MiB are free.
    assert found(course(1), course(1.5), course(1)).wrong() == []
    told = found(course(3), flat, course(30)).wrong()
    assert [line.split(" grew by ")[0] for line in told] == ["server 0.0, private", "object store, used"]
    assert found(flat, course(5), flat).wrong()[0].startswith("trial 1, private grew by ")


def test_a_process_that_keeps_what_it_is_given_is_seen() -> None:
    kept, given = [], [0.0]
    with MemoryWatch({"this": os.getpid()}, {"gauge": lambda: given[0]}, period=0.02) as reporter:
        for _ in range(40):
            kept.append(mmap.mmap(-1, MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))  # new pages, none that were freed
            kept[-1].write(b"1" * MIB)
            given[0] += MIB
            time.sleep(0.02)
    for grown in (reporter.courses["this"]["private"], reporter.courses["gauge"]["used"]):
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
