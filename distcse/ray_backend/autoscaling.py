"""Asks a cluster's autoscaler for the nodes of a run, and waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from distcse.errors import StoppedEarlyError, last_line
from distcse.events import LogMessage, Reporter
from distcse.placement.resources import ResourceRequest, find_shortfall
from distcse.ray_backend.nodes import alive

CHECK_INTERVAL_S = 1.0
"""Seconds between two looks at the nodes."""
RENEW_INTERVAL_S = 10.0
"""Seconds between two requests: Ray Train's coordinator, an actor that outlives runs, replaces them every 20 s."""


@contextmanager
def scaled_up(requests: Sequence[ResourceRequest], wait_s: float, reporter: Reporter) -> Iterator[None]:
    """Ask for nodes during the block, also for those that are there, which could leave as idle; see `Cluster.scaled_up`.

    Ray has one such request for the entire cluster: a later one, of this run or of another, replaces it.
    """
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_INTERVAL_S):
            _request(requests, reporter)

    _request(requests, reporter)
    thread = threading.Thread(target=renew, name="autoscaling", daemon=True)
    thread.start()
    try:
        _wait(requests, wait_s, reporter)
        yield
    finally:
        ended.set()
        thread.join()
        _request([], reporter)


def _request(requests: Sequence[ResourceRequest], reporter: Reporter) -> None:
    """Replace the cluster's request. A failure is a warning: the next one may succeed, and the block has its own errors."""
    each = [request for request in requests for _ in range(request.number)]
    try:
        request_resources(
            bundles=[_amounts(request) for request in each],
            bundle_label_selectors=[dict(request.labels or {}) for request in each],
        )
    except RayError as error:
        problem = f"Ray does not take the request for nodes: {last_line(error)}"
        reporter.emit(LogMessage(problem, warning=True))


def _wait(requests: Sequence[ResourceRequest], wait_s: float, reporter: Reporter) -> None:
    began, shown = time.monotonic(), ""
    while (shortfall := find_shortfall(requests, alive())) is not None:
        if reporter.stop_requested():
            raise StoppedEarlyError("stopped while the run waited for nodes; what is stored is kept")
        if time.monotonic() - began >= wait_s:
            text = f"no nodes for {shortfall} after {wait_s:g} s (resources.wait_s); continuing with the nodes that are there"
            reporter.emit(LogMessage(text, warning=True))
            return
        if shortfall != shown:
            reporter.emit(LogMessage(f"waiting up to {wait_s:g} s (resources.wait_s) for nodes for {shortfall}"))
            shown = shortfall
        time.sleep(CHECK_INTERVAL_S)


def _amounts(request: ResourceRequest) -> dict[str, float]:
    """Return at least one CPU: an autoscaler starts no node for a request of nothing but labels."""
    return {kind: amount for kind, amount in request.each.items() if amount} or {"CPU": 1.0}
