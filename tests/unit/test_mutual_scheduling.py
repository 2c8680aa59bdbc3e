"""The pool of slots that the groups of a mutual distillation share, and the rules by which they exchange scores."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from distcse.errors import ClusterTooSmallError
from distcse.runs.mutual.scheduling import (
    START_SLACK,
    RemainingWork,
    StepTimes,
    allocate_workers,
    makespan_bound,
    worker_counts,
)


def make_work(group: str, cost: float, workers: int = 0, pause_s: float = 0.0, serial: float = 0.0) -> RemainingWork:
    """Make a group of `cost` seconds on one worker, of which `serial` are not shortened, that can have 1, 2, 4 or 8."""
    seconds = {count: cost * (serial + (1 - serial) / count) for count in (1, 2, 4, 8)}
    return RemainingWork(group, seconds, workers, pause_s)


def random_work(drawn: random.Random, groups: int) -> list[RemainingWork]:
    return [
        make_work(str(index), math.exp(drawn.uniform(0, 4)), serial=drawn.uniform(0, 0.3)) for index in range(groups)
    ]


def test_workers_divide_the_global_batch() -> None:
    assert worker_counts(32, 20) == [1, 2, 4, 8, 16]
    assert worker_counts(6, 20) == [1, 2, 3, 6]
    assert worker_counts(32, 20, least=3) == [4, 8, 16]


@pytest.mark.parametrize(("streams", "slots", "least"), [(32, 3, 3), (7, 6, 2), (4, 20, 5)])
def test_a_pool_too_small_for_a_group_is_refused(streams: int, slots: int, least: int) -> None:
    with pytest.raises(ClusterTooSmallError, match=f"batch of {streams} parts on at least {least} workers"):
        worker_counts(streams, slots, least)


def test_measured_steps_correct_the_estimate() -> None:
    times = StepTimes(alone_s=1.0, serial_share=0.2)
    assert times.seconds(4) == pytest.approx(0.4)
    times.measure(1, 1.3)
    assert times.seconds(1) == pytest.approx(1.3)
    assert times.seconds(4) == pytest.approx(0.4 * 1.3)  # wrong by the same factor, until it is measured
    times.measure(8, 0.6)
    assert times.seconds(8) == pytest.approx(0.6)
    assert times.seconds(4) == pytest.approx(0.4 * 0.6 / 0.3)  # 8 is nearer to 4 than 1 is
    assert times.seconds(2) == pytest.approx(0.6 * 1.3)
    times.measure(8, 0.3)
    assert times.seconds(4) == pytest.approx(0.4)


def test_the_bound_is_the_best_that_fixed_numbers_of_workers_reach() -> None:
    drawn = random.Random(0)
    for _ in range(100):
        work, slots = random_work(drawn, drawn.randint(1, 4)), drawn.randint(8, 12)
        best = min(
            max(
                max(group.seconds[count] for group, count in zip(work, counts, strict=True)),
                sum(group.seconds[count] * count for group, count in zip(work, counts, strict=True)) / slots,
            )
            for counts in itertools.product((1, 2, 4, 8), repeat=len(work))
        )
        assert makespan_bound(work, slots) == pytest.approx(best)


def test_the_bound_of_no_group_is_zero() -> None:
    assert makespan_bound([], 8) == 0
    assert allocate_workers([], 8) == {}


def test_a_group_at_work_counts_with_the_slots_that_it_holds() -> None:
    new = make_work("new", 28)
    assert makespan_bound([make_work("no faster", 4, workers=1, serial=1.0), new], 8) == pytest.approx(4)
    assert makespan_bound([make_work("no faster", 4, workers=4, serial=1.0), new], 8) == pytest.approx((16 + 28) / 8)


def test_longer_groups_start_with_more_workers() -> None:
    work = [make_work("short", 1), make_work("long", 8), make_work("middle", 2)]
    assert allocate_workers(work, 11) == {"short": 1, "middle": 2, "long": 8}


def test_more_groups_than_slots_run_in_waves_from_the_longest() -> None:
    work = [make_work(str(cost), cost, serial=1.0) for cost in (1, 2, 3, 4)]  # more workers would not help
    first = allocate_workers(work, 2)
    assert first == {"4": 1, "3": 1, "2": 0, "1": 0}
    later = [make_work("1", 1, serial=1.0), make_work("2", 2, serial=1.0), make_work("4", 1, workers=1, serial=1.0)]
    assert allocate_workers(later, 2) == {"4": 1, "2": 1, "1": 0}


def test_a_group_starts_with_the_fewest_workers_that_let_it_end_with_the_others() -> None:
    drawn = random.Random(1)
    for _ in range(100):
        work, slots = random_work(drawn, drawn.randint(2, 12)), drawn.randint(8, 24)
        limit_s = START_SLACK * makespan_bound(work, slots)
        allocated = allocate_workers(work, slots)
        for group in work:
            if not all(allocated.values()) and (count := allocated[group.group]):
                assert group.seconds[count] <= limit_s
                assert count == 1 or group.seconds[count // 2] > limit_s


def test_free_slots_go_to_the_group_that_ends_last() -> None:
    work = [make_work("fast", 4, workers=1), make_work("slow", 12, workers=2)]
    assert allocate_workers(work, 5) == {"fast": 1, "slow": 4}
    assert allocate_workers(work, 6) == {"fast": 2, "slow": 4}


def test_no_group_grows_while_another_waits() -> None:
    work = [make_work("working", 100, workers=1), make_work("waiting", 400)]
    assert allocate_workers(work, 5) == {"working": 1, "waiting": 4}
    assert allocate_workers(work, 4) == {"working": 1, "waiting": 0}


def test_a_group_grows_only_if_that_pays_for_its_pause() -> None:
    assert allocate_workers([make_work("last", 12, workers=1, pause_s=5.9)], 2) == {"last": 2}
    assert allocate_workers([make_work("last", 12, workers=1, pause_s=6.0)], 2) == {"last": 1}


def test_a_group_at_work_never_shrinks() -> None:
    work = [make_work("large", 1, workers=8), make_work("new", 100)]
    assert allocate_workers(work, 8) == {"large": 8, "new": 0}
    assert allocate_workers(work, 4) == {
        "large": 8,
        "new": 0,
    }  # a node was lost: its workers are counted until they end


def test_no_more_workers_than_slots_and_no_deadlock() -> None:
    drawn = random.Random(2)
    for _ in range(200):
        slots = drawn.randint(8, 30)
        allocated = allocate_workers(random_work(drawn, drawn.randint(1, 30)), slots)
        assert 0 < sum(allocated.values()) <= slots
