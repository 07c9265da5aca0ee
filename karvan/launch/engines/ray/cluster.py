"""The connection to a Ray cluster: one that runs, or a small one on this machine that ends with the job.

A process has one connection. A program that has connected to Ray itself keeps its own.
"""

from __future__ import annotations

import ipaddress
import math
import os
import signal
import socket
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import ray

from karvan.launch.engines.ray.placement import living_nodes
from karvan.process_end import handling

# The job's folder as a Ray runtime environment: how its code reaches nodes that do not see the folder.
#
# Ray copies the folder in which the job is launched to its nodes, except what is never needed there, what the
# folder's .gitignore and .rayignore name, and the job's own checkpoints and logs. It is meant for programs: a
# folder that is too large is an error, because Ray would hold it in the memory of its head node.


MOST_BYTES = 100 << 20
_CACHES = ("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache")
_NEVER = (".git", ".venv", "venv", "node_modules", *_CACHES)
_IGNORE_FILES = (".gitignore", ".rayignore")


def runtime_environment(folder: Path, without: Iterable[Path] = ()) -> dict[str, Any]:
    """The runtime environment of a folder, without some below it; a ValueError if it is too large."""
    excludes = [*_NEVER, *_inside(folder, without)]
    sizes = _sizes(folder, excludes)
    if (size := sum(sizes.values())) > MOST_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        parts = ", ".join(f"{name} ({_megabytes(sizes[name])})" for name in largest)
        raise ValueError(
            f"Nodes get a copy of {folder}, because the job is launched there: expected at most "
            f"{_megabytes(MOST_BYTES)}, got {_megabytes(size)}; the largest: {parts}. Launch from a folder "
            "that has only programs, or list the other files in a file .rayignore."
        )
    return {"working_dir": str(folder), "excludes": excludes}


def _inside(folder: Path, paths: Iterable[Path]) -> list[str]:
    inside = [os.path.relpath(Path(folder, path), folder) for path in paths]
    return [f"/{path}" for path in inside if path != "." and not path.startswith("..")]


def _sizes(folder: Path, excludes: list[str]) -> dict[str, int]:
    """Bytes of each entry of the folder."""
    patterns = [*excludes, *_ignored(folder)]
    sizes: dict[str, int] = {}
    for where, folders, files in os.walk(folder):
        below = Path(where).relative_to(folder)
        folders[:] = [name for name in folders if not _matches(below / name, patterns)]
        for name in files:
            if not _matches(below / name, patterns) and not (path := Path(where, name)).is_symlink():
                first = (below / name).parts[0]
                sizes[first] = sizes.get(first, 0) + path.stat().st_size
    return sizes


def _ignored(folder: Path) -> list[str]:
    """What the ignore files name, as far as plain patterns go; Ray itself understands all of them."""
    nodes = []
    for name in _IGNORE_FILES:
        if (folder / name).is_file():
            lines = (line.strip() for line in (folder / name).read_text(errors="replace").splitlines())
            nodes += [line.rstrip("/") for line in lines if line and line[0] not in "#!"]
    return nodes


def _matches(path: Path, patterns: list[str]) -> bool:
    return any(
        fnmatch(str(path), pattern[1:])
        if pattern.startswith("/")
        else fnmatch(path.name, pattern) or fnmatch(str(path), pattern)
        for pattern in patterns
    )


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


NAMESPACE = "karvan"  # of the names of actors
_OBJECT_STORE = 100 << 20  # bytes; what roles exchange does not travel through Ray
_CLOSED_WITHIN = 5.0  # seconds
_LISTENS_WITHIN = 10.0
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": NAMESPACE}


class RayCluster:
    """A connection, which `close` ends, with the cluster if it was started for it."""

    def __init__(self, *, connected: bool, alone: bool) -> None:
        self._connected = connected
        self._threads: list[threading.Thread] = []
        self.on_this_machine = alone
        self.closed = threading.Event()

    def start(self, thread: threading.Thread) -> None:
        """Start a thread that uses the connection until `closed` is set: Ray would connect again for it."""
        self._threads = [*(thread for thread in self._threads if thread.is_alive()), thread]
        thread.start()

    @classmethod
    def connect(
        cls, address: str | None, folder: Path, *, cpus: float = 0.0, without: Iterable[Path] = ()
    ) -> RayCluster:
        """Connect to the cluster at an address; without one, start one on this machine.

        folder: where the job is launched; its nodes get a copy if the cluster has several machines, without
        some folders. cpus: of a cluster that is started; at least those of this machine.
        """
        if ray.is_initialized():
            return cls(connected=False, alone=_is_on_this_machine())
        with _handlers_kept():
            if address is None:
                _start(cpus)
                return cls(connected=True, alone=True)
            _connect(address)
            if alone := _is_on_this_machine():
                return cls(connected=True, alone=alone)
            # Known only now; and a runtime environment is that of a connection.
            ray.shutdown()
            _connect(address, runtime_env=runtime_environment(folder, without))
            return cls(connected=True, alone=False)

    def close(self) -> None:
        """End the connection. Processes go on, without a master, if the cluster does."""
        self.closed.set()
        for thread in self._threads:
            thread.join(_CLOSED_WITHIN)
        if self._connected:
            with _handlers_kept():
                ray.shutdown()


def has_actor(address: str, name: str) -> bool:
    """Whether an actor of this name exists, in the cluster that this process is connected to, or at an
    address; not if there is no cluster any more.
    """
    try:
        if not ray.is_initialized():
            with _handlers_kept():
                _connect(address)
        ray.get_actor(name, NAMESPACE)
    except (ConnectionError, ValueError):
        return False
    return True


def this_machine() -> str:
    """The address of this machine, as Ray's nodes have it."""
    return str(ray.util.get_node_ip_address())


def _start(cpus: float) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # of processes that do the work of this job
    count = max(len(os.sched_getaffinity(0)), math.ceil(cpus))
    ray.init(
        address="local", num_cpus=count, include_dashboard=False, object_store_memory=_OBJECT_STORE, **_QUIET
    )


def _connect(address: str, **more: Any) -> None:
    try:
        if address != "auto":  # Ray itself would try for a minute and more
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_LISTENS_WITHIN).close()
        ray.init(address=address, **_QUIET, **more)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConnectionError(
            f"Expected a running Ray cluster at {address}, got: {' '.join(str(error).split())[:500]} "
            "`ray start --head` starts one; without an address, the job starts its own."
        ) from error


def _is_on_this_machine() -> bool:
    host = this_machine()
    addresses = {node["NodeManagerAddress"] for node in living_nodes()}
    return all(address == host or ipaddress.ip_address(address).is_loopback for address in addresses)


def _handlers_kept() -> AbstractContextManager[None]:
    """Ray handles SIGTERM by ending the process; the launcher has something to save."""
    return handling({number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)})
