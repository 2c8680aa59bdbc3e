"""The warning of a run whose workers have not started, or were lost and are not there again."""

from __future__ import annotations

from distcse.events import Event, LogMessage, Reporter
from distcse.ray_backend.train_workers import WorkerWait


def test_each_time_without_a_worker_is_warned_of_once_within_a_minute() -> None:
    now, has_worker = 0.0, False
    events: list[Event] = []
    wait = WorkerWait(lambda: has_worker, "2 workers of 1 CPU each", Reporter(events.append), clock=lambda: now)

    def pass_seconds(seconds: int) -> int:
        """Check each second, and return how many warnings there are then."""
        nonlocal now
        for _ in range(seconds):
            now += 1
            wait.check()
        return len(events)

    assert [pass_seconds(45), pass_seconds(14), pass_seconds(100)] == [0, 1, 1]  # before the first start
    has_worker = True
    assert pass_seconds(500) == 1
    has_worker = False  # lost, and Ray Train waits for room
    assert [pass_seconds(45), pass_seconds(14), pass_seconds(100)] == [1, 2, 2]
    (first, second) = events
    assert first == second and isinstance(first, LogMessage)
    assert first.warning and "wait for room for 2 workers of 1 CPU each" in first.text
