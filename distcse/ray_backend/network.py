"""The network that workers of several nodes talk over."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from ipaddress import IPv4Address, ip_address

_ADDRESS_OF = 0x8915
"""The kernel's SIOCGIFADDR."""


def use_interface_of(address: str) -> None:
    """Let gloo talk over the interface that has a node's address. Wants to be called before a process group is opened.

    Left alone, gloo takes what the host's name resolves to: on Debian and in many containers the loopback, where no other
    node answers. GLOO_SOCKET_IFNAME stands where the user has set it.
    """
    interface = interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """Name of the interface that has an IPv4 address; None where none has it."""
    if not isinstance(ip_address(address), IPv4Address):
        return None
    wanted = socket.inet_aton(address)
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            try:
                answer = fcntl.ioctl(asking.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
        if answer[20:24] == wanted:
            return name
    return None
