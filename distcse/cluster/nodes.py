"""The nodes of a Ray cluster: which are alive and how fast, requests for more, and how long a run waits for lost ones.

Ray is imported in functions: `cluster` sets its variables first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from distcse.cluster.cluster import wait_for_ray
from distcse.cluster.versions import draining_nodes
from distcse.devices.cluster import ClusterSpeeds
from distcse.devices.process import repeated
from distcse.devices.resources import Node, ResourceRequest, Resources, find_shortfall
from distcse.errors import ClusterTooSmallError, StoppedEarlyError, last_line
from distcse.events import LogMessage, Reporter

if TYPE_CHECKING:  # PyTorch, which servers of cached tables do not import
    from ray.exceptions import RayError

    from distcse.devices.device import DeviceSpeed

T = TypeVar("T")

_START_TIMEOUT_S = 60.0
"""Seconds in which a live node starts a process."""
MAX_WAIT_S = 600.0
"""Seconds that a run waits for a replacement of a lost node: an autoscaler starts one in minutes."""
STOPPED_WAIT_S = 15.0
"""Seconds that a run waits for resources after a stop request. Workers that have resources start in this time and save a
checkpoint."""
CHECK_INTERVAL_S = 2.0
"""Seconds between two looks at the nodes."""
START_CHECK_INTERVAL_S = 1.0
"""Seconds between two looks at the nodes while an autoscaler starts some."""
RENEW_INTERVAL_S = 10.0
"""Seconds between two requests to the autoscaler: Ray Train's coordinator, which outlives runs, replaces them every 20 s."""


def live_nodes() -> list[Node]:
    """Return the live nodes of the cluster, with those that Ray drains."""
    import ray

    return [
        Node(node["NodeID"], node["Resources"], node["Labels"], node["NodeManagerAddress"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def this_machine() -> Node:
    """Return this machine as the only node of a cluster that a run will start here."""
    from distcse.devices import host
    from distcse.devices.device import gpu_count

    return Node("", {"CPU": float(host.cpus()), **({"GPU": float(gpus)} if (gpus := gpu_count()) else {})}, {})


def alive() -> list[Node]:
    """Return the live nodes of the cluster, without those that Ray drains, which take no new work."""
    leaving = draining_nodes()
    return [node for node in live_nodes() if node.id not in leaving]


def ask_nodes(
    nodes: Sequence[Node],
    function: Callable[..., T],
    *arguments: Any,
    timeout_s: float = _START_TIMEOUT_S,
    **options: Any,
) -> dict[str, T | RayError]:
    """Call a function in a task on each of some nodes. Ray notices a lost node only after seconds.

    Returns:
        What it returned, by node id, or the error: a `GetTimeoutError` after `timeout_s` seconds.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    task = ray.remote(num_cpus=0, max_retries=0, **options)(function)
    answers = {node.id: task.options(scheduling_strategy=On(node.id, soft=False)).remote(*arguments) for node in nodes}
    if answers:  # Ray may drain all nodes with the labels
        ray.wait([*answers.values()], num_returns=len(answers), timeout=timeout_s)
    found: dict[str, T | RayError] = {}
    for node, answer in answers.items():
        try:
            found[node] = ray.get(answer, timeout=0)
        except RayError as error:
            found[node] = error
    return found


def responsive_nodes(labels: Mapping[str, str] | None) -> list[Resources]:
    """Return the resources of each node with these labels that runs a test task."""
    nodes = [node for node in alive() if node.has(labels)]
    answers = ask_nodes(nodes, _is_there)
    return [node.resources for node in nodes if answers[node.id] is True]


def _is_there() -> bool:
    return True


def cluster_speeds() -> ClusterSpeeds:
    """Query the device speeds of all nodes, waiting for the cluster if it is starting. Nodes that do not answer are omitted."""
    wait_for_ray()
    import ray

    from distcse.devices.device import has_gpu

    own_id, nodes = ray.get_runtime_context().get_node_id(), alive()
    asked = [node for node in nodes if node.id != own_id or (node.resources.get("GPU") and not has_gpu())]
    # `max_calls` frees the process's CUDA context.
    speeds = ask_nodes(asked, _local_speeds, max_calls=1)
    for answer in speeds.values():
        if isinstance(answer, ray.exceptions.RayTaskError):  # the node works, and the function does not
            raise answer
    answers = [(node, speeds[node.id] if node in asked else _local_speeds()) for node in nodes]
    return ClusterSpeeds([(node, answer) for node, answer in answers if isinstance(answer, list)])


def _local_speeds() -> list[DeviceSpeed]:
    """Return the speeds of this machine's CPU and GPUs."""
    from distcse.devices.device import cpu_speed, gpu_count, gpu_speed

    return [cpu_speed(), *(gpu_speed(number) for number in range(gpu_count()))]


@contextmanager
def scaled_up(requests: Sequence[ResourceRequest], wait_s: float, reporter: Reporter) -> Iterator[None]:
    """Ask for nodes during the block, also for those that are there, which could leave as idle; see `Cluster.scaled_up`.

    Ray has one such request for the entire cluster: a later one, of this run or of another, replaces it.
    """
    _request_nodes(requests, reporter)
    try:
        with repeated(partial(_request_nodes, requests, reporter), RENEW_INTERVAL_S, "autoscaling"):
            _wait_for_nodes(requests, wait_s, reporter)
            yield
    finally:
        _request_nodes([], reporter)


def _request_nodes(requests: Sequence[ResourceRequest], reporter: Reporter) -> None:
    """Replace the cluster's request. A failure is a warning: the next one may succeed, and the block has its own errors."""
    from ray.autoscaler.sdk import request_resources
    from ray.exceptions import RayError

    each = [request for request in requests for _ in range(request.number)]
    try:
        request_resources(
            # At least one CPU: an autoscaler starts no node for a request of nothing but labels.
            bundles=[
                {kind: amount for kind, amount in request.each.items() if amount} or {"CPU": 1.0} for request in each
            ],
            bundle_label_selectors=[dict(request.labels or {}) for request in each],
        )
    except RayError as error:
        problem = f"Ray does not take the request for nodes: {last_line(error)}"
        reporter.warn(problem)


def _wait_for_nodes(requests: Sequence[ResourceRequest], wait_s: float, reporter: Reporter) -> None:
    began, shown = time.monotonic(), ""
    while (shortfall := find_shortfall(requests, alive())) is not None:
        if reporter.stop_requested():
            raise StoppedEarlyError("stopped while the run waited for nodes; what is stored is kept")
        if time.monotonic() - began >= wait_s:
            text = f"no nodes for {shortfall} after {wait_s:g} s (resources.wait_s); continuing with the nodes that are there"
            reporter.warn(text)
            return
        if shortfall != shown:
            reporter.emit(LogMessage(f"waiting up to {wait_s:g} s (resources.wait_s) for nodes for {shortfall}"))
            shown = shortfall
        time.sleep(START_CHECK_INTERVAL_S)


class ResourceWatchdog:
    """Limits the time that a run waits for lost nodes, because Ray waits forever."""

    def __init__(
        self, requests: Sequence[ResourceRequest], warn: Callable[[str], None], nodes: Sequence[Node] | None = None
    ) -> None:
        self._requests = requests
        self._warn = warn
        self._initial_ids = {node.id for node in (alive() if nodes is None else nodes)}
        self._checked_at = 0.0
        self._missing_since: float | None = None

    def check(self) -> None:
        """Check for lost nodes. Call it often: it does nothing for 2 s after a check.

        Raises:
            ClusterTooSmallError: A node was lost, and resources have been missing for `MAX_WAIT_S` seconds.
        """
        now = time.monotonic()
        if now - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at = now
        nodes = live_nodes()  # a drained node is lost when it is gone: until then, its processes work
        has_lost = bool(self._initial_ids - {node.id for node in nodes})
        shortfall = find_shortfall(self._requests, nodes) if has_lost else None
        if shortfall is None:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = now
            self._warn(
                f"the cluster lost a node and lacks resources for {shortfall}; waiting up to {MAX_WAIT_S:g} s for a new node"
            )
        elif now - self._missing_since >= MAX_WAIT_S:
            raise ClusterTooSmallError(
                f"the cluster lost a node and lacked resources for {shortfall} for {MAX_WAIT_S:g} s; add a node or lower the "
                "request, then continue with --resume"
            )


class DrainNotices:
    """Finds out that Ray drains nodes on which a run's workers are."""

    def __init__(self) -> None:
        self._checked_at = 0.0

    def count(self, hosts: Callable[[], set[str]]) -> int:
        """Return the number of drained nodes with workers. Call it often: it returns 0 for 2 s after a check."""
        if (now := time.monotonic()) - self._checked_at < CHECK_INTERVAL_S:
            return 0
        self._checked_at = now
        leaving = draining_nodes()
        return len(leaving & hosts()) if leaving else 0


def own_node_drains() -> Callable[[], bool]:
    """Return a function that tells whether Ray drains this process's node. It asks Ray every 2 s."""
    import ray

    notices, own = DrainNotices(), {ray.get_runtime_context().get_node_id()}
    is_drained = False

    def drains() -> bool:
        nonlocal is_drained
        is_drained = is_drained or notices.count(lambda: own) > 0
        return is_drained

    return drains
