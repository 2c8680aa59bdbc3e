"""What `Backend.run_on_devices` gets: the memory that work with a model needs, and the devices that it may run on."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.device import DeviceSpeed, local_speed
from distcse.errors import EncoderError, StorageError
from distcse.experiments.backend import GIB
from distcse.models import resolve_model
from distcse.placement.cluster import ClusterSpeeds
from distcse.placement.devices import DeviceOptions, select_nodes
from distcse.placement.resources import Node

_COPIES = 3
"""Copies of the weights' files: the file in memory, the weights in fp32, and another type or device."""


def model_memory(backbone: str | None) -> float:
    """Estimate the bytes of a process that loads a model and encodes test sets; without its weights if they are not here.

    Args:
        backbone: The model's name; None for an endpoint or a custom class, whose weights are elsewhere or unknown.
    """
    try:
        folder = None if backbone is None else resolve_model(backbone, only_local=True)
    except (EncoderError, StorageError):
        folder = None
    if folder is None:
        return 3 * GIB
    return 3 * GIB + _COPIES * sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def usable_devices(options: DeviceOptions, speeds: ClusterSpeeds, nodes: Sequence[Node]) -> list[DeviceSpeed]:
    """Return the devices on which functions with these options can run; without GPUs, this process's is one of them.

    Args:
        options: The options of `Backend.run_on_devices`.
        speeds: Device speeds of the cluster.
        nodes: Its nodes.
    """
    selected = select_nodes(options, nodes)
    if selected.has_gpus:
        return speeds.of(selected.labels, gpus=1.0)
    return [*speeds.of(selected.labels, gpus=0.0), local_speed()]
