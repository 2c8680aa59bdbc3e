"""The simulator of a mutual distillation's pool: schedules that can be computed by hand, and what every schedule obeys."""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import replace

import pytest

from benchmarks.mutual_schedule import (
    Machine,
    SimulatedGroup,
    asymmetric_cases,
    fixed,
    fluid_bound,
    simulate,
    standard_cases,
    waves,
)
from distcse.experiments.mutual.scheduling import START_SLACK, allocate_workers

OPTIONS = argparse.Namespace(seconds=600, serial=0.04, error=0.3)


def make_group(name: str, cost: float, serial: float = 0.0) -> SimulatedGroup:
    return SimulatedGroup.of_length(name, cost, serial)


def test_a_fixed_gpu_per_group_waits_for_the_slowest() -> None:
    found = simulate([make_group("a", 100), make_group("b", 300)], Machine(2, 0.0), fixed, cycles=1)
    assert found.makespan_s == pytest.approx(2 * 300 + 30)  # two phases, and the start's scoring
    assert found.busy == pytest.approx(400 / 600) and found.useful == pytest.approx(found.busy)
    assert found.changes == 0


def test_a_group_alone_has_all_slots_and_a_pause_per_phase() -> None:
    found = simulate([make_group("a", 100)], Machine(4, 7.0), allocate_workers, cycles=1)
    assert found.makespan_s == pytest.approx(2 * 100 / 4 + 10 / 4 + 3 * 7)
    assert found.busy_s == pytest.approx(210)


def test_workers_are_added_at_the_next_checkpoint() -> None:
    """The short group ends at 10 seconds; the long one, which scores for no time, then takes its slot."""
    groups = [
        SimulatedGroup.of_length(name, cost, 0.0, scoring_share=0.0) for name, cost in (("short", 10.0), ("long", 30.0))
    ]
    groups = [replace(group, batch_sizes={"bi": 2, "cross": 2}) for group in groups]

    def first_one_each(work, slots):  # type: ignore[no-untyped-def]
        return allocate_workers(work, slots) if len(work) == 1 else fixed(work, slots)

    def makespan_s(checkpoint_s: float) -> float:
        return simulate(groups, Machine(2, 0.0, checkpoint_s), first_one_each, cycles=1).makespan_s

    assert makespan_s(0.0) == pytest.approx(2 * (10 + 20 / 2))
    assert makespan_s(8.0) == pytest.approx(2 * (16 + 14 / 2))


def test_the_pool_is_busy_at_least_85_percent_of_the_time() -> None:
    cases = [
        *standard_cases(OPTIONS),
        *asymmetric_cases(OPTIONS)[:-1],
    ]  # the last group of the last case can use 2 of 20 slots
    for case in cases:
        found = simulate(case.groups, Machine(case.slots, 20.0), allocate_workers, cycles=1)
        assert found.busy >= 0.85, case.name


def test_a_group_that_cannot_use_the_pool_bounds_every_schedule() -> None:
    case = asymmetric_cases(OPTIONS)[-1]
    found = simulate(case.groups, Machine(case.slots, 20.0), allocate_workers, cycles=1)
    bound = fluid_bound(case.groups, case.slots, cycles=1)
    assert found.work_s / (case.slots * bound) < 0.2
    assert found.makespan_s < 1.02 * bound


def test_no_schedule_is_below_the_bound_and_the_pool_is_near_it() -> None:
    drawn = random.Random(0)
    for _ in range(15):
        slots = drawn.randint(1, 12)
        groups = [
            make_group(str(index), math.exp(drawn.uniform(0, 4)), drawn.uniform(0, 0.3))
            for index in range(drawn.randint(1, 12))
        ]
        bound = fluid_bound(groups, slots, cycles=1)
        for policy in (allocate_workers, waves):
            found = simulate(groups, Machine(slots, 0.0), policy, cycles=1)
            assert bound * (1 - 1e-9) <= found.makespan_s <= 2 * START_SLACK * bound
            assert found.work_s * (1 - 1e-9) <= found.busy_s <= slots * found.makespan_s * (1 + 1e-9)


def test_simulations_are_deterministic() -> None:
    case = standard_cases(OPTIONS)[1]
    machine = Machine(case.slots, 20.0, 30.0)
    assert simulate(case.groups, machine, allocate_workers, 1) == simulate(case.groups, machine, allocate_workers, 1)
