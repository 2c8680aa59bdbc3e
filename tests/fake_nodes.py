"""The provider of nodes of Ray's fake autoscaler, for types of nodes that say how much memory they have."""

from __future__ import annotations

from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class NodesWithMemory(FakeMultiNodeProvider):  # type: ignore[misc]
    """Starts nodes that take their memory from the machine: Ray's provider fails to start those whose type has any.

    Named by its class in the autoscaler's settings, because Ray's wheel lacks the defaults of the type fake_multinode.
    """

    def _create_node_with_resources_and_labels(
        self, node_config: Any, tags: Any, count: int, resources: dict[str, Any], labels: Any
    ) -> None:
        without = {kind: amount for kind, amount in resources.items() if kind != "memory"}
        super()._create_node_with_resources_and_labels(node_config, tags, count, without, labels)
