"""Network interface for communication between workers on several nodes."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from ipaddress import IPv4Address, ip_address

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
