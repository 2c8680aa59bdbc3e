"""Speeds of the devices of all nodes in the cluster, measured or looked up once on each node."""

from __future__ import annotations

from distcse.device import DeviceSpeed, cpu_speed, gpu_count, gpu_speed, has_gpu
from distcse.placement.cluster import ClusterSpeeds
from distcse.ray_backend.cluster import is_on_this_machine, wait_for_ray
from distcse.ray_backend.nodes import alive
from distcse.ray_backend.versions import SEES_ALL_GPUS

_ANSWER_TIMEOUT_S = 60.0
"""Seconds for a node to answer. Importing PyTorch takes seconds; a node that takes longer is probably lost."""


def cluster_speeds() -> ClusterSpeeds:
    """Query the device speeds of all nodes, waiting for the cluster if it is starting. Nodes that do not answer are omitted.

    Raises:
        RayConnectionError: The cluster cannot be joined or started.
    """
    wait_for_ray()
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

    own_id = ray.get_runtime_context().get_node_id()
    nodes, speeds = alive(), []
    # `max_calls` frees the process's CUDA context.
    query = ray.remote(num_cpus=0, max_calls=1, runtime_env={"env_vars": SEES_ALL_GPUS})(_local_speeds)
    pending = {
        node.id: query.options(scheduling_strategy=OnNode(node.id, soft=False)).remote()
        for node in nodes
        if node.id != own_id or (node.resources.get("GPU") and not has_gpu())
    }
    answered, _ = (
        ray.wait(list(pending.values()), num_returns=len(pending), timeout=_ANSWER_TIMEOUT_S) if pending else ([], [])
    )
    for node in nodes:
        if node.id not in pending:
            speeds.append((node, _local_speeds()))
        elif pending[node.id] in answered:
            speeds.append((node, ray.get(pending[node.id])))
    return ClusterSpeeds(speeds)


def needs_no_cluster() -> bool:
    """Return whether the cluster will be this machine without a GPU, whose speeds are known without waiting for Ray."""
    return is_on_this_machine() and not has_gpu()


def _local_speeds() -> list[DeviceSpeed]:
    return [cpu_speed(), *(gpu_speed(number) for number in range(gpu_count()))]
