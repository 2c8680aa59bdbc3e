"""What `benchmarks.schedule_check` reads from a run's events: a group that takes a second worker while it trains."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.schedule_check import measured_costs, pauses, read_stints, serial_share


def assigned(time: float, workers: int) -> dict[str, Any]:
    return {"event": "WorkersAssigned", "group": "a", "time": time, "workers": workers}


def began(time: float, activity: str, phase: int) -> dict[str, Any]:
    return {"event": "GroupActivity", "group": "a", "time": time, "activity": activity, "phase_index": phase}


def steps(first: float, seconds: float, number: int) -> list[dict[str, Any]]:
    return [
        {"event": "StepReport", "group": "a", "time": first + seconds * done, "seconds": seconds}
        for done in range(number)
    ]


def test_costs_and_pauses_are_read_from_events() -> None:
    """Each start takes 5 seconds. A step takes 2 with one worker and 1.2 with two; scores take 6 seconds on one."""
    start = [assigned(0, 1), began(0, "scoring", 0), assigned(11, 0)]
    alone = [assigned(20, 1), began(20, "training", 1), *steps(27, 2, 4)]
    grown = [assigned(33, 2), *steps(39.2, 1.2, 4), began(42.8, "scoring", 1), assigned(45.8, 0)]
    last = [assigned(50, 1), began(50, "training", 2), *steps(57, 2, 2), began(59, "scoring", 2), assigned(65, 0)]
    found = read_stints([{"event": "StageProgress", "time": 0}, *start, *alone, *grown, *last])["a"]
    assert serial_share(found) == pytest.approx(0.2)
    costs = measured_costs(found)
    assert (costs["cross"].training_s, costs["cross"].scoring_s) == pytest.approx((8 + 4.8 / 0.6, 6))
    assert (costs["bi"].training_s, costs["bi"].scoring_s) == pytest.approx((4, 6))
    assert pauses(found, costs) == pytest.approx([5] * 4)
