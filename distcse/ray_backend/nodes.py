"""The live nodes of a Ray cluster, and the limit of the time that a run waits for lost ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distcse.errors import ClusterTooSmallError
from distcse.placement.resources import Node, ResourceRequest, Resources, find_shortfall, format_resources
from distcse.ray_backend.versions import draining_nodes

_START_TIMEOUT_S = 60.0
"""Seconds in which a live node starts a process."""
MAX_WAIT_S = 600.0
"""Seconds that a run waits for a replacement of a lost node: an autoscaler starts one in minutes."""
STOPPED_WAIT_S = 15.0
"""Seconds that a run waits for resources after a stop request. Workers that have resources start in this time and save a
checkpoint."""
CHECK_INTERVAL_S = 2.0
"""Seconds between two looks at the nodes."""
_STATE_TIMEOUT_S = 10
_MAX_ACTORS = 1000
_MAX_HOLDERS = 3


def live_nodes() -> list[Node]:
    """Return the live nodes of the cluster, with those that Ray drains."""
    import ray

    return [
        Node(node["NodeID"], node["Resources"], node["Labels"], node["NodeManagerAddress"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def alive() -> list[Node]:
    """Return the live nodes of the cluster, without those that Ray drains, which take no new work."""
    leaving = draining_nodes()
    return [node for node in live_nodes() if node.id not in leaving]


def responsive_nodes(labels: Mapping[str, str] | None) -> list[Resources]:
    """Return the resources of each node with these labels that runs a test task. Ray notices a lost node only after seconds."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    test_task = ray.remote(num_cpus=0, max_retries=0)(_do_nothing)
    nodes = [node for node in alive() if node.has(labels)]
    answers = [test_task.options(scheduling_strategy=On(node.id, soft=False)).remote() for node in nodes]
    if answers:  # Ray may drain all nodes with the labels
        ray.wait(answers, num_returns=len(answers), timeout=_START_TIMEOUT_S)
    return [node.resources for node, answer in zip(nodes, answers, strict=True) if _has_succeeded(answer)]


def describe_holders() -> str:
    """Return which actors hold the cluster's CPUs and GPUs, for the message of a wait.

    Such as `held by 4 x RayTrainWorker of job 02000000 (1 CPU each)`. Actors in placement groups are named without resources.
    """
    from ray.util.state import list_actors
    from ray.util.state.exception import RayStateApiException

    try:
        actors = list_actors(
            filters=[("state", "=", "ALIVE")], detail=True, limit=_MAX_ACTORS, timeout=_STATE_TIMEOUT_S
        )
    except RayStateApiException:  # the cluster has no dashboard, or it does not answer
        return "`ray status` shows who holds the resources"
    holders: Counter[str] = Counter()
    for actor in actors:
        each = {kind: amount for kind, amount in (actor.required_resources or {}).items() if kind in ("CPU", "GPU")}
        if any(each.values()) or actor.placement_group_id:
            held = f" ({format_resources(each)} each)" if any(each.values()) else ""
            holders[f"{actor.class_name} of job {actor.job_id}{held}"] += 1
    if not holders:
        return "no actor holds them; `ray status` shows who does"
    listed = [f"{number} x {holder}" for holder, number in holders.most_common(_MAX_HOLDERS)]
    more = len(holders) - len(listed)
    return f"held by {', '.join(listed)}" + (f" and {more} other kinds" if more else "")


class ResourceWatchdog:
    """Limits the time that a run waits for lost nodes, because Ray waits forever.

    Args:
        requests: Resources that the run needs.
        warn: Called with a message once resources are missing.
        nodes: The cluster's nodes at the run's start. Default: the current ones.
    """

    def __init__(
        self, requests: Sequence[ResourceRequest], warn: Callable[[str], None], nodes: Sequence[Node] | None = None
    ) -> None:
        self._requests = requests
        self._warn = warn
        self._initial_ids = {node.id for node in (alive() if nodes is None else nodes)}
        self._checked_at = 0.0
        self._missing_since: float | None = None
        self._has_warned_of_order = False

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
            self._warn_of_order(nodes if has_lost else [])
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

    def _warn_of_order(self, nodes: Sequence[Node]) -> None:
        """Warn once if the nodes suffice, but not for all orders in which the actors may start again."""
        if self._has_warned_of_order or not nodes:
            return
        if shortfall := find_shortfall(self._requests, nodes, in_start_order=True):
            self._has_warned_of_order = True
            self._warn(
                f"the cluster lost a node; {shortfall} may wait forever, because others may start first on the nodes that it "
                "needs. If the run stands still, add a node, or stop it and continue with --resume"
            )


class DrainNotices:
    """Finds out that Ray drains nodes on which a run's workers are."""

    def __init__(self) -> None:
        self._checked_at = 0.0

    def count(self, hosts: Callable[[], set[str]]) -> int:
        """Return the number of drained nodes with workers. Call it often: it returns 0 for 2 s after a check.

        Args:
            hosts: Returns the ids of the nodes with workers; called while Ray drains nodes.
        """
        if (now := time.monotonic()) - self._checked_at < CHECK_INTERVAL_S:
            return 0
        self._checked_at = now
        leaving = draining_nodes()
        return len(leaving & hosts()) if leaving else 0


def _do_nothing() -> None:
    """Task that tests whether a node runs tasks."""


def _has_succeeded(answer: Any) -> bool:
    import ray

    try:
        ray.get(answer, timeout=0)
        return True
    except (ray.exceptions.RayError, TimeoutError):
        return False
