"""The connection to a Ray cluster: one that runs, or a small one on this machine that ends with the job.

A process has one connection. A program that has connected to Ray itself keeps its own.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ray

from karvan.launch.engines.ray.code_package import runtime_environment
from karvan.launch.engines.ray.placement.nodes import living_nodes

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
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
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
    here = this_machine()
    addresses = {node["NodeManagerAddress"] for node in living_nodes()}
    return all(address == here or ipaddress.ip_address(address).is_loopback for address in addresses)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray handles SIGTERM by ending the process; the launcher has something to save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
