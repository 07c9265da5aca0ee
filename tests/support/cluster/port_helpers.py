"""Which sockets of a process others may reach: read from /proc, as a stranger on the machine would."""

import ipaddress
import os
import socket
import struct
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from processes import family_of

ROLES = ("trainer", "parameter-server", "embedding-worker", "loader", "master")
_LISTEN = "0A"
_ACCEPTS = 0x10000  # flag of a Unix socket that listens


class Listening(NamedTuple):
    """A socket that others may reach."""

    process: int
    kind: str  # tcp, tcp6, udp, udp6 or unix
    host: str  # or the path of a Unix socket
    port: int


def listening(pid):
    """All sockets of a process that others may reach."""
    inodes = set()
    with suppress(OSError):
        for place in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                kind, _, inode = os.readlink(place).partition(":")
                if kind == "socket":
                    inodes.add(inode.strip("[]"))
    return [Listening(pid, *each) for each in _reachable(pid, inodes)]


def _reachable(pid, inodes):
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
                _, local, remote, state, *_ = fields = line.split()
                unconnected = kind.startswith("udp") and remote.endswith(":0000")
                if fields[9] in inodes and (state == _LISTEN or unconnected):
                    host, port = local.split(":")
                    yield kind, _host(host), int(port, 16)
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[6] in inodes and int(fields[3], 16) & _ACCEPTS:
                yield "unix", fields[7] if len(fields) > 7 else "", 0


def _host(text):
    """An address as /proc writes it: 32-bit words in the byte order of the machine."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    return str(getattr(address, "ipv4_mapped", None) or address)


def connects(host, port, seconds=1.0):
    """Whether a stranger can connect."""
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError:
        return False
    return True


def _of_cuda(socket):
    """Whether NVIDIA's driver listens, at a name of this machine, in every process that uses a GPU."""
    return socket.kind == "unix" and socket.host.startswith("@cuda-uvmfd-")


def sockets_of(job):
    """The folder of a job's socket files, as it says in its log."""
    [line] = [each for each in job.log.read_text().splitlines() if "Registry at unix:" in each]
    return line.partition("Registry at ")[2].partition("/master-0.sock")[0]


def check_ports(job, host):
    """One port, or socket file in the folder `host`, for each role that serves; no port that a stranger can
    connect to of a trainer.
    """
    role_of = {pid: role for role in ROLES for pid in job.pids(role)}
    found = [each for pid in family_of(job.process.pid) for each in listening(pid) if not _of_cuda(each)]
    text = "\n".join(f"{role_of.get(each.process)}: {each}" for each in found)
    ports = [each for each in found if each.kind != "unix"]
    served = Counter(role_of.get(each.process) for each in ports if connects(each.host, each.port))
    if host.startswith("unix:"):  # services listen there, and only torch at ports
        files = [each for each in found if each.kind == "unix"]
        assert {os.path.dirname(each.host) for each in files} == {host.removeprefix("unix:")}, text
        assert {(role_of.get(each.process), each.host) for each in ports} <= {("trainer", "127.0.0.1")}, text
        assert not served, text
        served = Counter(role_of.get(each.process) for each in files)
    else:
        assert {each.kind for each in found} <= {"tcp", "tcp6"}, text
        assert {each.host for each in found} == {host}, text
    assert served == {"master": 1, "parameter-server": 2, "embedding-worker": 1, "loader": 1}, text
