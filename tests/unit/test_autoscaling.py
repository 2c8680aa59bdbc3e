"""Requests of nodes from a cluster's autoscaler, without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler import sdk
from ray.exceptions import RayError

from distcse.cluster import backend, nodes
from distcse.cluster.backend import RayCluster
from distcse.devices.resources import Node, ResourceRequest
from distcse.errors import StoppedEarlyError
from distcse.events import Event, LogMessage, Reporter
from distcse.recipe import Recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.experiment import Distillation
from distcse.runs.distillation.preflight import check_embedding
from distcse.runs.mutual.experiment import MutualDistillation
from tests.clusters import FixedCluster
from tests.failures import fails_with
from tests.pairs import make_mutual_recipe

NODES = [Node("a", {"CPU": 4.0}, {"role": "students"})]
WORKERS = ResourceRequest(
    "training.workers=2", 2, {"CPU": 2.0, "GPU": 0.0}, {"role": "students"}, "training.workers", {}
)
FOR_WORKERS = [({"CPU": 2.0}, {"role": "students"})] * 2


class Autoscaler:
    """Records each request, and whether the process had joined the cluster at that time."""

    def __init__(self) -> None:
        self.is_joined = False
        self.fails = False
        self.requests: list[tuple[list[Any], bool]] = []
        self.renewed = threading.Event()

    @contextmanager
    def joined(self, **settings: Any) -> Iterator[None]:
        was_joined, self.is_joined = self.is_joined, True
        yield
        self.is_joined = was_joined

    def request(self, bundles: Sequence[Any], bundle_label_selectors: Sequence[Any]) -> None:
        self.requests.append((list(zip(bundles, bundle_label_selectors, strict=True)), self.is_joined))
        if len(self.requests) > 3:
            self.renewed.set()
        if self.fails:
            raise RayError("no answer")


@pytest.fixture
def autoscaler(monkeypatch: pytest.MonkeyPatch) -> Autoscaler:
    scaler = Autoscaler()
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(backend, "cluster", scaler.joined)
    monkeypatch.setattr(sdk, "request_resources", scaler.request)
    monkeypatch.setattr(nodes, "alive", lambda: NODES)
    monkeypatch.setattr(nodes, "START_CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(nodes, "RENEW_INTERVAL_S", 0.001)
    return scaler


def test_a_request_is_renewed_during_the_block_and_withdrawn_before_the_cluster_is_left(autoscaler: Autoscaler) -> None:
    """Also for nodes that are there, and with an inner block that joins the cluster, as an embedding pass has."""
    cluster = RayCluster()
    with cluster.scaled_up([WORKERS], 60.0, Reporter()):
        with cluster.joined():
            pass
        assert autoscaler.renewed.wait(60)
    assert not autoscaler.is_joined
    *during, last = autoscaler.requests
    assert all(request == (FOR_WORKERS, True) for request in during) and last == ([], True)


def test_an_error_of_the_block_is_not_hidden_by_a_request_that_fails(autoscaler: Autoscaler) -> None:
    events: list[Event] = []
    with (
        fails_with(StoppedEarlyError, "the block's own error"),
        RayCluster().scaled_up([WORKERS], 60.0, Reporter(events.append)),
    ):
        autoscaler.fails = True
        raise StoppedEarlyError("the block's own error")
    assert autoscaler.requests[-1][0] == []
    assert events[-1] == LogMessage("Ray does not take the request for nodes: no answer", warning=True)


def test_a_local_cluster_is_not_waited_for(autoscaler: Autoscaler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that will be started, nor one that is entered already."""
    monkeypatch.setattr(backend, "was_started_here", lambda: True)
    with RayCluster().scaled_up([WORKERS], 60.0, Reporter()):
        pass
    monkeypatch.setattr(backend, "was_started_here", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS")
    with RayCluster().scaled_up([WORKERS], 60.0, Reporter()):
        pass
    assert not autoscaler.requests


def test_a_wait_ends_after_its_time_or_a_stop_request(autoscaler: Autoscaler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "alive", lambda: [])
    events: list[Event] = []
    with RayCluster().scaled_up([WORKERS], 0.01, Reporter(events.append)):
        pass
    texts = [event.text for event in events if isinstance(event, LogMessage)]
    shortfall = "2 of training.workers=2 (2 CPUs each) on a node with role=students"
    assert texts == [
        f"waiting up to 0.01 s (resources.wait_s) for nodes for {shortfall}",
        f"no nodes for {shortfall} after 0.01 s (resources.wait_s); continuing with the nodes that are there",
    ]
    with (
        fails_with(StoppedEarlyError, "waited for nodes"),
        RayCluster().scaled_up([WORKERS], 60.0, Reporter(stop_requested=lambda: True)),
    ):
        pass
    assert autoscaler.requests[-1] == ([], True)


class UnaskedCluster(FixedCluster):
    """A cluster that must not be asked for nodes."""

    def scaled_up(
        self, requests: Sequence[ResourceRequest], wait_s: float, reporter: Reporter
    ) -> AbstractContextManager[None]:
        raise AssertionError(requests)


def test_dry_runs_ask_for_no_nodes(
    recipe_with: Callable[..., Recipe], tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    backend, wait = LocalBackend(), "resources.wait_s=60"
    backend.cluster = UnaskedCluster([Node("", {"CPU": 4.0}, {})])  # type: ignore[assignment]
    recipe = recipe_with("training.workers=1", wait)
    check_embedding(recipe, backend, Reporter())
    Distillation(recipe).check(backend, Reporter())
    mutual = make_mutual_recipe(tmp_path / "mutual", {"bert": tiny("bert")}, sentences, wait)
    MutualDistillation(mutual).check(backend, Reporter())
