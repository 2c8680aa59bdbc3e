"""Nodes that Ray drains: they get no new work, and what runs there continues until they are gone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from distcse.cluster import nodes, shared_storage
from distcse.cluster.nodes import DrainNotices, ResourceWatchdog
from distcse.devices.resources import Node, ResourceRequest

IDS = ("own", "drained", "other", "lost")


@pytest.fixture(autouse=True)
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether each node is alive, as `ray.nodes` says; it says so of a drained one."""
    states = {name: name != "lost" for name in IDS}

    def listed() -> list[dict[str, object]]:
        about = {"Resources": {"CPU": 1.0}, "Labels": {}}
        return [
            {"NodeID": name, "NodeManagerAddress": f"{name}.local", "Alive": is_alive, **about}
            for name, is_alive in states.items()
        ]

    monkeypatch.setattr(ray, "nodes", listed)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "own"))
    monkeypatch.setattr(nodes, "draining_nodes", lambda: frozenset({"drained"}))
    monkeypatch.setattr(nodes, "CHECK_INTERVAL_S", 0.0)
    return states


def test_a_drained_node_lives_and_gets_no_work() -> None:
    assert [node.id for node in nodes.live_nodes()] == ["own", "drained", "other"]
    assert [(node.id, node.address) for node in nodes.alive()] == [("own", "own.local"), ("other", "other.local")]
    assert shared_storage.other_nodes([None]) == {"other": "other.local"}


def test_a_drained_node_is_lost_when_it_is_gone(states: dict[str, bool]) -> None:
    warnings: list[str] = []
    workers = ResourceRequest("training.workers=3", 3, {"CPU": 1.0}, None, "training.workers", {})
    before = [Node(name, {"CPU": 1.0}, {}) for name in IDS[:3]]
    watchdog = ResourceWatchdog([workers], warnings.append, before)
    watchdog.check()
    assert not warnings
    states["drained"] = False
    watchdog.check()
    assert len(warnings) == 1 and "1 of training.workers=3 (1 CPU each)" in warnings[0]


def test_a_notice_counts_the_nodes_with_workers() -> None:
    assert DrainNotices().count(lambda: {"drained", "other"}) == 1
    assert DrainNotices().count(lambda: {"other"}) == 0
