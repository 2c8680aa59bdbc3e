"""The simulated fleet: what binds it, and what the redesign moved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.fleet import ROWS, WORKERS, Fleet, table


def fleet(workers: int, rows: int, is_present: bool = True, **changes: float) -> Fleet:
    return replace(Fleet(workers, rows, is_present), **changes)  # type: ignore[arg-type]


def test_parts_that_one_process_does_take_the_same_time_on_any_number_of_workers() -> None:
    few, many = fleet(8, 10**9).parts(), fleet(512, 10**9).parts()
    assert few["reading"] == many["reading"]
    assert few["tokenizing"] > 50 * many["tokenizing"]
    first = [fleet(workers, 10**9, False).parts()["tokenizing"] for workers in (8, 512)]
    assert first[0] == first[1] > many["tokenizing"]
    assert few["embedding"] == pytest.approx(64 * many["embedding"])
    assert few["compute"] == pytest.approx(64 * many["compute"], rel=1e-4)


def test_one_server_binds_many_workers_and_the_workers_own_lists_do_not() -> None:
    assert fleet(64, 10**8, False).lists_step > 10 * fleet(64, 10**8, False).rates.step
    assert fleet(64, 10**8).lists_step < fleet(64, 10**8).rates.step


def test_tables_in_place_take_a_request_a_row_and_teacher() -> None:
    assert fleet(64, 10**9).lists_step == pytest.approx(8192 * 2 / 5500)
    assert fleet(64, 10**9, local_disk=4e12).lists_step < 0.001


def test_the_order_of_rows_takes_no_memory_in_a_large_corpus() -> None:
    assert fleet(8, 10**8).worker_bytes == 12e8
    assert fleet(8, 10**9).worker_bytes == 0
    assert "memory" in (fleet(8, 10**10, False).obstacle or "")
    assert "disk" in (fleet(8, 10**9, False).obstacle or "")


def test_preemptions_cost_a_restart_each_after_a_notice_and_repeated_steps_without() -> None:
    present, first = fleet(64, 10**9, preemptions=0.2), fleet(64, 10**9, False, preemptions=0.2)
    assert present.preempted() % present.rates.restart == 0
    expected = 0.2 * present.nodes * present.steps * present.step_seconds / 3600 * present.rates.restart
    assert present.preempted() == pytest.approx(expected, rel=0.3)
    assert first.preempted() > present.preempted()


def test_the_table_has_a_row_for_each_fleet() -> None:
    assert len(list(table(2e12))) == 2 + len(ROWS) * len(WORKERS)
