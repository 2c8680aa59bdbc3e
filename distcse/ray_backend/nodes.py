"""The nodes of a Ray cluster: which a recipe may use, by their labels, and whether there is room on them for what it asks, at its
start and when nodes are lost."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distcse.errors import ClusterTooSmallError, NodeLabelError

Resources = Mapping[str, float]
"""Amounts by Ray's names: {"CPU": 4, "GPU": 1}."""

_ROUNDING = 1e-9
_PATIENCE = 60.0
"""Seconds in which a node that is there starts a process."""
WAIT = 600.0
"""Seconds that a run waits for nodes that it lost: an autoscaler brings a new one in minutes."""
STOPPED_WAIT_S = 15.0
"""Seconds that a run waits for room once it was asked to stop: workers that have room are up by then, and save a checkpoint."""
_LOOK = 2.0


@dataclass(frozen=True)
class Node:
    """One node of the cluster."""

    id: str
    resources: Resources
    labels: Mapping[str, str]

    def has(self, labels: Mapping[str, str] | None) -> bool:
        """Whether it has all of some labels; None are those of any node."""
        return (labels or {}).items() <= self.labels.items()


@dataclass(frozen=True)
class ResourceRequest:
    """Actors that must run at the same time, all alike."""

    description: str
    """How the recipe asks for them, such as training.workers=2."""
    number: int
    each: Resources
    """What one of them takes, on one node."""
    labels: Mapping[str, str] | None
    """Of the nodes that they may be put on; None is any node."""
    fewer: str
    """Knob that says how many."""
    smaller: Mapping[str, str]
    """Knobs that say how much one takes, by Ray's name for it."""
    instead: str = ""
    """Another way out."""

    def ways_out(self, kinds: Iterable[str]) -> str:
        """What to lower where some resources do not suffice."""
        knobs = [self.fewer, *(self.smaller[kind] for kind in kinds if kind in self.smaller)]
        return " or ".join(knobs) + (f", or {self.instead}" if self.instead else "")


def alive() -> list[Node]:
    """The nodes of the cluster."""
    import ray

    return [Node(node["NodeID"], node["Resources"], node["Labels"]) for node in ray.nodes() if node["Alive"]]


def nodes_with(labels: Mapping[str, str] | None, knob: str) -> list[Resources]:
    """What each node of some labels has; with none, each node of the cluster.

    Args:
        labels: Of the nodes that count.
        knob: Where they were asked for.

    Raises:
        RunError: No node has them.
    """
    chosen = [node.resources for node in alive() if node.has(labels)]
    if labels and not chosen:
        asked = _told_labels(labels)
        raise NodeLabelError(
            f'no node has the labels {asked} of {knob}; start some by ray start --labels "{asked}", or write null'
        )
    return chosen


def answering(labels: Mapping[str, str] | None) -> list[Resources]:
    """What each node of some labels has that runs a task now. A node that is gone counts as alive for some seconds more."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    ask = ray.remote(num_cpus=0, max_retries=0)(_answer)
    nodes = [node for node in alive() if node.has(labels)]
    answers = [ask.options(scheduling_strategy=On(node.id, soft=False)).remote() for node in nodes]
    ray.wait(answers, num_returns=len(answers), timeout=_PATIENCE)
    return [node.resources for node, answer in zip(nodes, answers, strict=True) if _came(answer)]


def refuse_impossible(demands: Sequence[ResourceRequest], nodes: Sequence[Node]) -> None:
    """Raise `RunError` where nodes can never run all demands at the same time.

    What is refused is impossible: too much in sum, or more of one kind than there is room for, as nothing lies on two nodes.
    How unlike demands share nodes is left to Ray.
    """
    for labels in (None, *(demand.labels for demand in demands if demand.labels)):
        there = [node.resources for node in nodes if node.has(labels)]
        _refuse_sum([d for d in demands if (labels or {}).items() <= (d.labels or {}).items()], there, whose(labels))
    for demand in demands:
        there = [node.resources for node in nodes if node.has(demand.labels)]
        if (room := fitting(there, demand.each)) < demand.number:
            raise ClusterTooSmallError(
                f"{demand.description} wants room for {demand.number} of {format_resources(demand.each)} each, and none lies on two "
                f"nodes: {whose(demand.labels)} {format_nodes(there)}, room for {room}; lower {demand.ways_out(demand.each)}"
            )


def find_shortfall(demands: Sequence[ResourceRequest], nodes: Sequence[Node]) -> str | None:
    """What nodes have no room for at the same time, in words; None where they have room for all.

    Who has the least choice is put first, where it leaves the others most; which may, rarely, find no room where there is some.
    """
    left = [(node, dict(node.resources)) for node in nodes]
    least_choice = sorted(demands, key=lambda d: (not d.labels, -d.each.get("GPU", 0.0), -d.each.get("CPU", 0.0)))
    for demand in least_choice:
        for placed in range(demand.number):
            fits = [
                (_wanted_by_others(node, there, demand, demands), number)
                for number, (node, there) in enumerate(left)
                if node.has(demand.labels) and fitting([there], demand.each)
            ]
            if not fits:
                where = f" on a node with {_told_labels(demand.labels)}" if demand.labels else ""
                each = format_resources(demand.each)
                return f"{demand.number - placed} of {demand.description} ({each} each){where}"
            _, there = left[min(fits)[1]]
            for kind, amount in demand.each.items():
                there[kind] = there.get(kind, 0.0) - amount
    return None


def fitting(nodes: Sequence[Resources], each: Resources) -> int:
    """How many actors of one kind nodes have room for."""
    wanted = {kind: amount for kind, amount in each.items() if amount}
    if not wanted:
        return sys.maxsize if nodes else 0
    return sum(min(int(node.get(kind, 0.0) / want + _ROUNDING) for kind, want in wanted.items()) for node in nodes)


class ResourceWatchdog:
    """Waits for nodes that were lost, but not for ever: Ray would. While none is lost, what runs has its room.

    Args:
        demands: What the run needs.
        tell: Told once, when something is lacking.
        nodes: Of the cluster as the run found it; None are those of now.
    """

    def __init__(
        self, demands: Sequence[ResourceRequest], tell: Callable[[str], None], nodes: Sequence[Node] | None = None
    ) -> None:
        self._demands = demands
        self._tell = tell
        self._there = {node.id for node in (alive() if nodes is None else nodes)}
        self._looked = 0.0
        self._since: float | None = None

    def look(self) -> None:
        """Call often. Raises `RunError` where something has been lacking for `WAIT` seconds."""
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        nodes = alive()
        found = find_shortfall(self._demands, nodes) if self._there - {node.id for node in nodes} else None
        if found is None:
            self._since = None
        elif self._since is None:
            self._since = now
            self._tell(f"the cluster has no room any more for {found}; waiting up to {WAIT:g} s for a new node")
        elif now - self._since >= WAIT:
            raise ClusterTooSmallError(
                f"the cluster had no room for {found} for {WAIT:g} s: a node was lost. Add one, or ask for less; what was "
                "done is kept, --resume goes on"
            )


def even_share(nodes: Sequence[float], workers: int) -> float:
    """The most CPUs that each of some workers can have on nodes of these CPUs, to a tenth; no worker lies on two nodes."""
    shares = {int(10 * cpus / number) / 10 for cpus in nodes for number in range(1, workers + 1)}
    enough = (share for share in shares if share and sum(int(cpus / share + _ROUNDING) for cpus in nodes) >= workers)
    return max(enough, default=0.1)


def format_resources(amounts: Resources) -> str:
    """Such as `4 CPUs and 0.5 GPUs`."""
    told = [
        f"{amounts[kind]:g} {kind}{'' if amounts[kind] == 1 else 's'}" for kind in ("CPU", "GPU") if amounts.get(kind)
    ]
    return " and ".join(told) or "no CPU"


def _refuse_sum(demands: Sequence[ResourceRequest], nodes: Sequence[Resources], whose: str) -> None:
    for kind in ("CPU", "GPU"):
        there = sum(node.get(kind, 0.0) for node in nodes)
        asking = [demand for demand in demands if demand.each.get(kind)]
        asked = sum(demand.each[kind] * demand.number for demand in asking)
        if asked > there + _ROUNDING:
            ways = "; or ".join(dict.fromkeys(demand.ways_out([kind]) for demand in asking))
            told = ", ".join(f"{demand.description} of {format_resources(demand.each)}" for demand in asking)
            raise ClusterTooSmallError(
                f"the run needs {asked:g} {kind}s at the same time ({told}), {whose} {there:g}; lower {ways}"
            )


def _wanted_by_others(
    node: Node, there: Resources, demand: ResourceRequest, demands: Sequence[ResourceRequest]
) -> tuple[int, float, float]:
    """How much a demand takes from the others on a node with so much left: what has its labels, a GPU it has no use for, CPUs."""
    asked = sum(bool(other.labels) and node.has(other.labels) for other in demands if other is not demand)
    return asked, 0.0 if demand.each.get("GPU") else there.get("GPU", 0.0), there.get("CPU", 0.0)


def _answer() -> None:
    """Run on a node, to see whether it runs anything."""


def _came(answer: Any) -> bool:
    import ray

    try:
        ray.get(answer, timeout=0)
        return True
    except (ray.exceptions.RayError, TimeoutError):
        return False


def whose(labels: Mapping[str, str] | None) -> str:
    """The nodes with some labels as the subject of a sentence, such as `the nodes with role=students have`."""
    return f"the nodes with {_told_labels(labels)} have" if labels else "the cluster has"


def _told_labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels.items())


def format_nodes(nodes: Sequence[Resources]) -> str:
    """Such as `2 x 4 CPUs, 1 x 8 CPUs and 1 GPU`."""
    alike = Counter(format_resources(node) for node in nodes)
    return ", ".join(f"{number} x {told}" for told, number in alike.items())
