"""The nodes of a Ray cluster, by their labels."""

from __future__ import annotations

from collections.abc import Mapping

from distcse.errors import RunError


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
