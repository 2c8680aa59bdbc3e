"""Parts of Ray actors and of what watches them, without Ray."""

from __future__ import annotations

import socket
from threading import Event
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from distcse.cluster.group_actors import open_group_store
from distcse.cluster.heartbeat import HeartbeatMonitor


def test_the_port_of_a_process_group_stays_bound_until_all_have_joined() -> None:
    """Another process could take a port that is only asked for, before the group binds it."""
    store = open_group_store("127.0.0.1", 0, workers=2)
    with socket.socket() as taker, pytest.raises(OSError, match="in use"):
        taker.bind(("", store.port))
    store.set("key", "value")
    assert open_group_store("127.0.0.1", store.port, workers=2).get("key") == b"value"


def test_an_owner_of_actors_that_answers_too_late_is_asked_again() -> None:
    calls, is_asked_again = [0], Event()

    def find_actors() -> dict[str, Any]:
        calls[0] += 1
        if calls[0] == 2:
            raise GetTimeoutError("no answer in time")
        if calls[0] == 3:
            is_asked_again.set()
        return {}

    with HeartbeatMonitor(0.01, pytest.fail, find_actors):
        assert is_asked_again.wait(60)
