"""A network namespace whose connection with this machine tests interrupt, and restore.

This machine has two addresses there, one for the master of a job and one for its servers, so that they can be
cut off one by one. An address that is cut off does not answer, and nobody gets an error from the network. A
link that is pulled is gone for the programs of the namespace, which get errors at once.
"""

import itertools
import os
import secrets
from contextlib import contextmanager

import pytest
from chaos_helpers import mutual_tls
from two_machines import can_make_namespaces, ip

_NOBODY = "02:00:00:00:00:01"  # frames to it are dropped by who receives them
_numbers = itertools.count()


class FarNetwork:
    """The namespace: its address there, and those of this machine here."""

    def __init__(self, folder, name, subnet):
        self.name, self.interface = name, f"{name}b"
        self.near = f"{name}a"
        self.here, self.servers, self.there = (f"{subnet}.{last}" for last in (1, 2, 3))
        self.tls = mutual_tls(folder, self.here, self.servers, self.there)
        files = {"TOKEN_FILE": "token", "TLS_CERT": "cert", "TLS_KEY": "key", "TLS_CA": "ca"}
        self.security = {f"KARVAN_{key}": str(folder / file) for key, file in files.items()}
        self.security["KARVAN_TLS_MUTUAL"] = "1"
        self.far = f"{name}/{self.interface}"

    def make(self):
        ip("netns", "add", self.name)
        ip("link", "add", self.near, "type", "veth", "peer", "name", self.interface, "netns", self.name)
        for address in (self.here, self.servers):
            ip("addr", "add", f"{address}/24", "dev", self.near)
        ip("link", "set", self.near, "up")
        ip("-n", self.name, "addr", "add", f"{self.there}/24", "dev", self.interface)
        for device in (self.interface, "lo"):
            ip("-n", self.name, "link", "set", device, "up")

    @contextmanager
    def pulled(self):
        """Without the link."""
        ip("-n", self.name, "link", "set", self.interface, "down")
        try:
            yield
        finally:
            ip("-n", self.name, "link", "set", self.interface, "up")

    @contextmanager
    def silent(self, *addresses):
        """Without answers of these addresses of this machine; of all if none is given."""
        places = [[("-n", self.name), each, self.interface] for each in addresses]
        if not addresses:
            places = [[("-n", self.name), each, self.interface] for each in (self.here, self.servers)]
            places.append([(), self.there, self.near])
        for where, address, device in places:
            ip(*where, "neigh", "replace", address, "lladdr", _NOBODY, "dev", device, "nud", "permanent")
        try:
            yield
        finally:
            for where, address, device in places:
                ip(*where, "neigh", "del", address, "dev", device)


@contextmanager
def far_network(folder):
    """A namespace, or a skipped test where none can be made."""
    if not can_make_namespaces():
        pytest.skip("network namespaces cannot be made here: that needs root, and ip and unshare")
    unique = secrets.randbelow(1 << 14)  # tests may run side by side
    name = f"kf{os.getpid() % 100000}{next(_numbers)}"
    network = FarNetwork(folder, name, f"10.{128 + (unique >> 8)}.{unique & 255}")
    try:
        network.make()
        yield network
    finally:
        ip("netns", "del", name)
