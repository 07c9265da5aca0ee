"""`is_loopback`: whether only this machine can reach a host, so that a token may travel without TLS."""

from __future__ import annotations

import ipaddress

UNIX = "unix:"  # the host "unix:/PATH" is a socket file


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host == "localhost" or host.startswith(UNIX):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_everywhere(host: str) -> bool:
    """Whether a host means all interfaces of a machine, such as 0.0.0.0."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
