"""Warnings of long waits for the cluster."""

from __future__ import annotations

from distcse.events import Event, LogMessage, Reporter, WaitWarning


def test_a_long_wait_is_reported_once() -> None:
    events: list[Event] = []
    short, long = WaitWarning(Reporter(events.append)), WaitWarning(Reporter(events.append), after_s=0.0)
    for _ in range(2):
        short.check("short")
        long.check("waiting for a node")
    assert events == [LogMessage("waiting for a node", warning=True)] and long.waited_s > 0
