"""Asks a cluster's autoscaler for the nodes of a run, and waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ray.autoscaler.sdk import request_resources

from distcse.errors import StoppedEarlyError
from distcse.events import LogMessage, Reporter
from distcse.placement.resources import ResourceRequest, find_shortfall
from distcse.ray_backend.nodes import alive

_CHECK_INTERVAL_S = 1.0


@contextmanager
def scaled_up(requests: Sequence[ResourceRequest], wait_s: float, reporter: Reporter) -> Iterator[None]:
    """See `Cluster.scaled_up`.

    Ray has one such request for the entire cluster: a later one, of this run or of another, replaces it. Ray Train makes its
    own when the workers start.
    """
    if find_shortfall(requests, alive()) is None:
        yield
        return
    # At least one CPU each: an autoscaler starts no node for a request of nothing but labels.
    each = [request for request in requests for _ in range(request.number)]
    request_resources(
        bundles=[_amounts(request) for request in each],
        bundle_label_selectors=[dict(request.labels or {}) for request in each],
    )
    try:
        _wait(requests, wait_s, reporter)
        yield
    finally:
        request_resources(bundles=[])


def _wait(requests: Sequence[ResourceRequest], wait_s: float, reporter: Reporter) -> None:
    began, shown = time.monotonic(), ""
    while (shortfall := find_shortfall(requests, alive())) is not None:
        if reporter.stop_requested():
            raise StoppedEarlyError("stopped while the run waited for nodes; start it again with --resume or --run-id")
        if time.monotonic() - began >= wait_s:
            text = f"no nodes for {shortfall} after {wait_s:g} s (resources.wait_s); continuing with the nodes that are there"
            reporter.emit(LogMessage(text, warning=True))
            return
        if shortfall != shown:
            reporter.emit(LogMessage(f"waiting up to {wait_s:g} s (resources.wait_s) for nodes for {shortfall}"))
            shown = shortfall
        time.sleep(_CHECK_INTERVAL_S)


def _amounts(request: ResourceRequest) -> dict[str, float]:
    return {kind: amount for kind, amount in request.each.items() if amount} or {"CPU": 1.0}
