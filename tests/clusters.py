"""A cluster of given nodes, without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from distcse.devices.cluster import ClusterSpeeds, Labels, Paths
from distcse.devices.resources import Node, ResourceRequest
from distcse.events import Reporter


@dataclass
class FixedCluster:
    """A `Cluster` that is always joined. It records the paths that all nodes must see, and finds them shared."""

    live: Sequence[Node]
    device_speeds: ClusterSpeeds = field(default_factory=lambda: ClusterSpeeds([]))
    autoscales: bool = False
    required: list[tuple[Mapping[str, Path], set[str], list[Labels]]] = field(default_factory=list)
    """Written folders, keys of read paths and labels of each call of `require_alike`."""

    def starting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def joined(self) -> AbstractContextManager[None]:
        return nullcontext()

    def nodes(self) -> list[Node]:
        return list(self.live)

    def can_grow(self) -> bool:
        return self.autoscales

    def scaled_up(
        self, requests: Sequence[ResourceRequest], wait_s: float, reporter: Reporter
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def is_one_cpu(self) -> bool:
        return False

    def speeds(self) -> ClusterSpeeds:
        return self.device_speeds

    def require_alike(self, written: Paths, read: Paths, labels: Sequence[Labels]) -> None:
        assert all(folder.is_dir() for folder in written.values())
        self.required.append((written, set(read), list(labels)))
