"""The nodes of a Ray cluster: what those of some labels have, and whether they still have what a run needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distcse.errors import RunError

WAIT = 600.0
"""Seconds that a run waits for nodes that it lost: an autoscaler brings a new one in minutes."""
_LOOK = 2.0


def resources_on(labels: Mapping[str, str] | None, knob: str) -> dict[str, float]:
    """What the nodes of some labels have; with none, what the cluster has.

    Args:
        labels: Of the nodes that count.
        knob: Where they were asked for.

    Raises:
        RunError: No node has them.
    """
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    chosen = [node for node in alive if (labels or {}).items() <= node["Labels"].items()]
    if labels and not chosen:
        asked = ", ".join(f"{name}={value}" for name, value in labels.items())
        raise RunError(
            f'no node has the labels {asked} of {knob}; start some by ray start --labels "{asked}", or write null'
        )
    kinds = {kind for node in chosen for kind in node["Resources"]}
    return {kind: sum(node["Resources"].get(kind, 0.0) for node in chosen) for kind in kinds}


@dataclass(frozen=True)
class Need:
    """Processes that a run needs somewhere."""

    what: str
    number: int
    each: Mapping[str, float]
    """What one of them reserves."""
    labels: Mapping[str, str] | None = None
    """Of the nodes where they may be."""


def lacking(needs: Sequence[Need]) -> str | None:
    """What the nodes that are alive have no room for, in words; None where there is room for all."""
    import ray

    nodes = [(node["Labels"], dict(node["Resources"])) for node in ray.nodes() if node["Alive"]]
    for need in needs:
        for placed in range(need.number):
            fitting = (
                there
                for labels, there in nodes
                if (need.labels or {}).items() <= labels.items()
                and all(there.get(kind, 0.0) >= amount for kind, amount in need.each.items())
            )
            if (there := next(fitting, None)) is None:
                return _told(need, need.number - placed)
            for kind, amount in need.each.items():
                there[kind] = there.get(kind, 0.0) - amount
    return None


def _told(need: Need, short: int) -> str:
    each = ", ".join(f"{kind} {amount:g}" for kind, amount in need.each.items() if amount)
    labels = ", ".join(f"{name}={value}" for name, value in (need.labels or {}).items())
    where = f" on a node with the labels {labels}" if labels else ""
    return f"{short} of {need.number} {need.what}{f' ({each} each)' if each else ''}{where}"


class Patience:
    """Waits for nodes that were lost, but not for ever: Ray would.

    Args:
        needs: What the run needs.
        tell: Told once, when something is lacking.
    """

    def __init__(self, needs: Sequence[Need], tell: Callable[[str], None]) -> None:
        self._needs = needs
        self._tell = tell
        self._looked = 0.0
        self._since: float | None = None

    def look(self) -> None:
        """Call often. Raises `RunError` where something has been lacking for `WAIT` seconds."""
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        found = lacking(self._needs)
        if found is None:
            self._since = None
        elif self._since is None:
            self._since = now
            self._tell(f"the cluster has no room any more for {found}; waiting up to {WAIT:g} s for a new node")
        elif now - self._since >= WAIT:
            raise RunError(
                f"the cluster had no room for {found} for {WAIT:g} s: a node was lost. Add one, or ask for less; what was "
                "done is kept, --resume goes on"
            )
