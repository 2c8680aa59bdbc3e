"""What the devices of the cluster's nodes are fast at, asked of each node once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from distcse.device import DeviceSpeed, cpu_speed, gpu_speed
from distcse.ray_backend.cluster import is_on_this_machine, wait_for_ray
from distcse.ray_backend.nodes import Node, alive

_ANSWERS_WITHIN_S = 60.0
"""A node imports PyTorch in seconds; one that does not answer by then is one that Ray has yet to find lost."""


@dataclass(frozen=True)
class ClusterSpeeds:
    """Devices by node."""

    nodes: Sequence[tuple[Node, Sequence[DeviceSpeed]]]

    def of(self, labels: Mapping[str, str] | None, gpus: float) -> list[DeviceSpeed]:
        """The devices that an actor may get on nodes of these labels: GPUs where it takes any, else CPUs."""
        kind = "gpu" if gpus else "cpu"
        return [device for node, devices in self.nodes if node.has(labels) for device in devices if device.kind == kind]


def cluster_speeds() -> ClusterSpeeds:
    """The devices of all nodes that answer. Waits for the cluster where it is still coming up."""
    wait_for_ray()
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

    own = ray.get_runtime_context().get_node_id()
    nodes, found = alive(), []
    # Ray hides GPUs from a task that takes none, unless this says otherwise; `max_calls` ends the process and its CUDA context.
    sees_gpus = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    ask = ray.remote(num_cpus=0, max_calls=1, runtime_env=sees_gpus)(_speeds_here)
    asked = {
        node.id: ask.options(scheduling_strategy=OnNode(node.id, soft=False)).remote()
        for node in nodes
        if node.id != own or (node.resources.get("GPU") and not torch.cuda.is_available())
    }
    answered, _ = (
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWERS_WITHIN_S) if asked else ([], [])
    )
    for node in nodes:
        if node.id not in asked:
            found.append((node, _speeds_here()))
        elif asked[node.id] in answered:
            found.append((node, ray.get(asked[node.id])))
    return ClusterSpeeds(found)


def needs_no_cluster() -> bool:
    """Whether Ray will be started on this machine, which has no GPU: then this process can answer for it, and need not wait."""
    return is_on_this_machine() and not torch.cuda.is_available()


def _speeds_here() -> list[DeviceSpeed]:
    return [cpu_speed(), *(gpu_speed(number) for number in range(torch.cuda.device_count()))]
