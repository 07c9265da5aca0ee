"""Finds the network interface of a host, so that torch's ports listen only there.

gloo and NCCL choose an interface by themselves, such as that of the machine's name, regardless of the job's
host. Two variables override this. A host that means all interfaces (0.0.0.0), or that is not an address of
this machine, names none: gloo then listens at the address of the machine's name.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFCONF = 0x8912  # Linux: all interfaces with an IPv4 address
_ENTRY = struct.Struct("16s16s8x")  # name and address, in 64-bit Linux
_MOST = 1024  # entries


def interface_settings(host: str) -> dict[str, str]:
    """Environment variables that keep gloo and NCCL on the interface of a host."""
    name = interface_of(host)
    # "=" asks NCCL for exactly this name; otherwise "eth1" would match "eth10" as well.
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def interface_of(host: str) -> str | None:
    """The interface of this machine that has an address of this host; None if there is no single one."""
    addresses = _addresses(host)
    if any(address.is_unspecified for address in addresses):
        return None
    interfaces = [*_ipv4(), *_ipv6()]
    for address in addresses:
        for name, has in interfaces:
            if address == has or (address.is_loopback and has.is_loopback):
                return name
    return None


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _addresses(host: str) -> list[_Address]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]


def _ipv4() -> list[tuple[str, _Address]]:
    space = array.array("B", bytes(_MOST * _ENTRY.size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(space), space.buffer_info()[0])
        try:
            size, _ = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))
        except OSError:  # not Linux
            return []
    found: list[tuple[str, _Address]] = []
    for label, address in _ENTRY.iter_unpack(bytes(space[:size])):
        name = label.partition(b"\0")[0].decode().partition(":")[0]  # "eth0:1" is another address of eth0
        found.append((name, ipaddress.IPv4Address(address[4:8])))
    return found


def _ipv6() -> list[tuple[str, _Address]]:
    found: list[tuple[str, _Address]] = []
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.append((name, ipaddress.IPv6Address(int(digits, 16))))
    return found
