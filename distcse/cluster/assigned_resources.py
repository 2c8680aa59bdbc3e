"""Restricts an actor's process to the GPUs and CPUs that Ray assigned to it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from ipaddress import IPv4Address, ip_address

import ray

from distcse.devices import host


def use_assigned() -> None:
    """Restrict an actor to the GPUs and CPUs that Ray assigned to it. Call it before PyTorch initializes CUDA."""
    use_gpus()
    use_threads()


def use_gpus(gpus: float | None = None) -> None:
    """Restrict an actor's process to its GPUs, by default those that Ray assigned. Call it before PyTorch initializes CUDA.

    All GPUs are hidden from an actor that reserved none, because Ray leaves `CUDA_VISIBLE_DEVICES` as it is for
    `num_gpus=0`. An actor with a fraction of a GPU gets that fraction of its memory, so that it cannot exhaust that of others.
    """
    gpus = _assigned("GPU", 0.0) if gpus is None else gpus
    if not gpus:
        host.hide_gpus()
    elif gpus < 1:
        from distcse.devices.device import limit_memory  # imports PyTorch, which servers of cached tables do not need

        limit_memory(gpus)


def use_threads(number: int | None = None) -> None:
    """Limit PyTorch's threads, by default to the CPUs that Ray assigned, if PyTorch is imported."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(number or max(1, int(_assigned("CPU", 1.0))))


def _assigned(kind: str, default: float) -> float:
    found: float = ray.get_runtime_context().get_assigned_resources().get(kind, default)
    return found


_SIOCGIFADDR = 0x8915
"""Linux's ioctl request for an interface's address."""


def use_interface_of(address: str) -> None:
    """Make gloo use the network interface with a node's address. Call it before creating a process group.

    By default, gloo uses the address that the host name resolves to. On Debian and in many containers this is the loopback
    address, which other nodes cannot reach. A GLOO_SOCKET_IFNAME that the user has set is kept.
    """
    interface = interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an IPv4 address; None if there is none."""
    if not isinstance(ip_address(address), IPv4Address):
        return None
    packed_address = socket.inet_aton(address)
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no address
                continue
        if answer[20:24] == packed_address:
            return name
    return None
