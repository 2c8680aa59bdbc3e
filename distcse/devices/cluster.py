"""The interface of a cluster, for code that decides where a run's processes go and does not depend on Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from distcse.devices.resources import Node, ResourceRequest
from distcse.events import Reporter

if TYPE_CHECKING:  # PyTorch, which servers of cached tables do not import
    from distcse.devices.device import DeviceSpeed

Labels = Mapping[str, str] | None
"""Required labels of a node; None is any node."""
Paths = Mapping[str, Path]
"""Files and folders by the recipe key that names them."""


@dataclass(frozen=True)
class ClusterSpeeds:
    """Device speeds of a cluster's nodes."""

    nodes: Sequence[tuple[Node, Sequence[DeviceSpeed]]]
    """Each node that answered, with its devices."""

    def of(self, labels: Labels, gpus: float) -> list[DeviceSpeed]:
        """Return the devices that an actor can get."""
        kind = "gpu" if gpus else "cpu"
        return [device for node, devices in self.nodes if node.has(labels) for device in devices if device.kind == kind]


class Cluster(Protocol):
    """The cluster of a run: joined while its work is done, and queried for its nodes before."""

    def starting(self) -> AbstractContextManager[None]:
        """Start or join the cluster in the background during the block, and leave it if the block raises an error."""
        ...

    def joined(self) -> AbstractContextManager[None]:
        """Join the cluster for the block."""
        ...

    def nodes(self) -> list[Node]:
        """Return the live nodes, waiting for the cluster if it is starting; this machine, if it will be the only node."""
        ...

    def can_grow(self) -> bool:
        """Return whether an autoscaler may start nodes: not for a cluster that is, or will be, of this machine alone."""
        ...

    def scaled_up(
        self, requests: Sequence[ResourceRequest], wait_s: float, reporter: Reporter
    ) -> AbstractContextManager[None]:
        """Join the cluster for the block, ask its autoscaler for nodes meanwhile, and wait for them before the block.

        With 0 seconds, or on a cluster that cannot grow, it does nothing.

        It returns after `wait_s` seconds although nodes are missing, because fewer may be enough: what plans on the nodes
        refuses a run for which they are too few.
        """
        ...

    def is_one_cpu(self) -> bool:
        """Return whether the cluster will be this machine without a GPU, whose speed is known without waiting for the cluster."""
        ...

    def speeds(self) -> ClusterSpeeds:
        """Measure or look up the device speeds of all nodes, waiting for the cluster if it is starting."""
        ...

    def require_alike(self, written: Paths, read: Paths, labels: Sequence[Labels]) -> None:
        """Check that every node which can get work has this node's versions, time and files.

        Args:
            written: Existing folders, or addresses in object storage, that the run writes to on several nodes.
            read: Files and folders that the run only reads. Those missing here are names, such as a hub model, that each node
                resolves itself; they are not checked.
            labels: Labels of the nodes that can get work.
        """
        ...
