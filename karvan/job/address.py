"""Addresses of services: "host:port", or "unix:/PATH" for a socket file on this machine.

In code, an address is a host and a port; the host of a socket file is "unix:/PATH", and its port is 0. Only
processes that may enter the folder of a socket file reach the service, or could put another file in its
place. So that folder must be private, which services and callers check.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# `MasterAddress`: where the master of a job is, which has its registry and its leased work.
#
# A master that is restarted on another machine has another address. Its engine leaves that in the *master
# address file* of every process that runs (KARVAN_MASTER_ADDRESS_FILE). Clients call a `MasterAddress` at
# every attempt to connect, so they find the master again after the connection to the last one was lost or
# refused. The file says only where to look: the token of the job, and its TLS, say who the master is.


@dataclass(frozen=True)
class MasterAddress:
    """An address "host:port" that may change; called, it says the present one.

    first: that with which the process was started. file: the path of its master address file, or "".
    """

    first: str
    file: str = ""

    def __call__(self) -> str:
        """What the file says; the first address without one, or if there is nothing to read in it."""
        if not self.file:
            return self.first
        try:
            lines = Path(self.file).read_text().splitlines()
        except (OSError, UnicodeDecodeError):  # the engine has removed it, since this process is to end
            return self.first
        return lines[0].strip() if lines and lines[0].strip() else self.first

    def __str__(self) -> str:
        return self()


def make_master_address(path: Path, address: str) -> None:
    """Make a master address file, for this user only."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    change_master_address(path, address)


def change_master_address(path: Path, address: str) -> None:
    """Write another address into the file, if it exists and there is one.

    In place, so that nothing appears in a folder that is just being removed.
    """
    with suppress(FileNotFoundError):
        if address:
            with path.open("r+b") as file:
                file.write(f"{address}\n".encode())
                file.truncate()


UNIX = "unix:"
_PATH = re.compile(r"(/[A-Za-z0-9._+@-]+)+")  # what a URI of Flight, a list and a line can hold as it is


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host, so that a token may travel without TLS."""
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


def join_address(host: str, port: int) -> str:
    """The address as a text, with brackets around an IPv6 address."""
    if host.startswith(UNIX):
        return host
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an address."""
    if address.startswith(UNIX):
        return unix_host(address.removeprefix(UNIX)), 0
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"An address expects host:port or {UNIX}/PATH, got {address!r}.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def unix_host(path: str | Path) -> str:
    """The host that means a socket file."""
    if not _PATH.fullmatch(str(path)):
        raise ValueError(
            f"A socket file expects an absolute path of ASCII letters, digits and ._+@-, got {str(path)!r}."
        )
    return f"{UNIX}{path}"


def socket_beside(address: str, name: str) -> str | None:
    """The host of another socket file in the folder of this one; None for host:port."""
    if not address.startswith(UNIX):
        return None
    return unix_host(Path(address.removeprefix(UNIX)).with_name(name))


def location(host: str, port: int, tls: bool) -> str:
    """The address as a URI of Flight."""
    if host.startswith(UNIX):
        return f"grpc+unix://{host.removeprefix(UNIX)}"
    return f"{'grpc+tls' if tls else 'grpc+tcp'}://{join_address(host, port)}"


def reachable(address: str, advertised: str = "") -> str:
    """An address for other machines: with the advertised host, or this machine's name for 0.0.0.0 or ::."""
    host, port = split_address(address)
    if host.startswith(UNIX):
        return address
    return join_address(advertised or (socket.getfqdn() if is_everywhere(host) else host), port)


def check_private(host: str) -> None:
    """Raise if users besides this one may enter or change the folder of a socket file."""
    folder = Path(host.removeprefix(UNIX)).parent
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(
            f"A socket file expects a folder of this user (uid {os.geteuid()}) with mode 700, got {folder} "
            f"of uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}."
        )


def holds_sockets(folder: Path) -> bool:
    """Whether socket files of a job's services, such as embedding-worker-10000.sock, can be here."""
    probe = folder / "embedding-worker-probe.sock"
    try:
        unix_host(probe)
        with socket.socket(socket.AF_UNIX) as test_socket:
            test_socket.bind(str(probe))
        probe.unlink()
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def binding(host: str) -> Iterator[None]:
    """While a service binds its socket file, if it has one: an OSError if another process listens there.

    gRPC itself replaces a socket file, whether or not its service lives.
    """
    if not host.startswith(UNIX):
        yield
        return
    path = host.removeprefix(UNIX)
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system that locks no folders
            fcntl.flock(folder, fcntl.LOCK_EX)
        if (process := _listener_of(path)) is not None:
            raise OSError(errno.EADDRINUSE, f"process {process} listens there")
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_UN)  # also for a process that was forked meanwhile
        os.close(folder)


def shut_connections(host: str, port: int) -> None:
    """Shut down the connections that a port or socket file of this process has accepted."""
    for name in os.listdir("/proc/self/fd"):
        # A descriptor that was closed in the meantime may be another one: the duplicate is asked what it is.
        with suppress(OSError):
            duplicate = os.dup(int(name))
            try:
                _shut_if_accepted(duplicate, host, port)
            finally:
                os.close(duplicate)


def _shut_if_accepted(descriptor: int, host: str, port: int) -> None:
    """Shut down a connection of this host and port; an OSError for anything else."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    socket_ = socket.socket(fileno=descriptor)
    try:
        ours = socket_.getsockname()
        if (f"{UNIX}{ours}" == host) if isinstance(ours, str) else (ours[1:2] == (port,)):
            socket_.getpeername()  # an OSError for the socket that listens
            socket_.shutdown(socket.SHUT_RDWR)
    finally:
        socket_.detach()


def _listener_of(path: str) -> int | None:
    """The process that listens at a socket file; None if it has ended, even if a fork of it lives."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        process = int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    with suppress(OSError, IndexError):
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
        return None if state == b"Z" else process
    return None if process else 0  # 0: of another container
