"""`persia.env`: the place of this process among those of its kind, its job, and its services.

The place comes from the variables of PERSIA or Karvan. A job has a registry, which stands for NATS. A
launched job tells each process how many others there are. Processes that were started one by one ask the
registry, at which every process says how many of its role there are.
"""

from __future__ import annotations

import logging
import os
import random
import socket
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from karvan import distributed
from karvan.argument_checks import check_counts
from karvan.compat.persia.config import read_global_config, unsupported, warn_of_tuning
from karvan.dense.communication import DenseReduce
from karvan.discovery.directory import Directory
from karvan.job.environment import JobEnvironment, count_name, set_variables
from karvan.job.roles import Role
from karvan.settings import parse
from karvan.wire import Security, WireError

PERSIA_SKIP_CHECK_DATA = os.environ.get("PERSIA_SKIP_CHECK_DATA", "0") not in ("", "0")
PERSIA_LAUNCHER_VERBOSE = os.environ.get("PERSIA_LAUNCHER_VERBOSE", "0") not in ("", "0")


def get_world_size() -> int:
    """The number of trainers; 1 without WORLD_SIZE."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def get_rank() -> int:
    """The number of this trainer; 0 without RANK."""
    return int(os.environ.get("RANK") or 0)


def get_local_rank() -> int:
    """The number of this trainer on its machine; 0 without LOCAL_RANK."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def get_replica_size() -> int:
    """The number of processes of this role: REPLICA_SIZE, or that of the launched job."""
    return int(os.environ.get("REPLICA_SIZE") or _job().count)


def get_replica_index() -> int:
    """The number of this process among them: REPLICA_INDEX, or that of the launched job."""
    return int(os.environ.get("REPLICA_INDEX") or _job().index)


def set_env(
    replica_size: int | None = None,
    replica_index: int | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    local_rank: int | None = None,
) -> None:
    """Set the place of this process, in its environment; what is None is unset."""
    place = {"REPLICA_SIZE": replica_size, "REPLICA_INDEX": replica_index, "WORLD_SIZE": world_size}
    for name, value in {**place, "RANK": rank, "LOCAL_RANK": local_rank}.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = str(value)


def reload_env() -> None:
    """Nothing to do: the environment is read by every call."""


def _job() -> JobEnvironment:
    job = JobEnvironment.read()
    return JobEnvironment() if job.role is Role.TRAINER else job


_DEFAULT = "embedding_worker:8887"  # of the services of PERSIA's docker compose


def get_embedding_worker_services() -> list[str]:
    """The addresses of embedding workers: of EMBEDDING_WORKER_SERVICE, of the job, or PERSIA's default."""
    named = os.environ.get("EMBEDDING_WORKER_SERVICE", "")
    if named:
        return [address.strip() for address in named.split(",") if address.strip()]
    return list(JobEnvironment.read().addresses.get(Role.EMBEDDING_WORKER, ())) or [_DEFAULT]


_log = logging.getLogger("karvan.compat")

_ADDRESSES = ("PERSIA_NATS_URL", "PERSIA_NATS_IP")
_ATTEMPT = 3.0  # seconds after which the wait for a role is logged, once
_FOUND_WITHIN = 600.0  # seconds for the processes of a job to be started


def join_job() -> bool:
    """Whether this process belongs to a job; variables of PERSIA are then set as Karvan's, too."""
    job = JobEnvironment.read()
    if not job.registry and (address := _registry_address()):
        set_variables(os.environ, {"registry": address})
    job = JobEnvironment.read()
    if job.registry and job.role is Role.TRAINER and not job.process and "RANK" in os.environ:
        # A launcher that is not Karvan's knows the rank alone.
        set_variables(os.environ, {"index": int(os.environ["RANK"]), "count": get_world_size()})
    return bool(job.registry) or bool(job.addresses)


def _registry_address() -> str:
    for name in _ADDRESSES:
        address = os.environ.get(name, "").strip().removeprefix("nats://").rstrip("/")
        if not address:
            continue
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(
                f"{name} expects the host:port of the job's registry, which stands for NATS, such as "
                f"localhost:4222, got {address!r}."
            )
        return address
    return ""


def wait_for_roles(*roles: Role) -> None:
    """Wait until the job has processes of these roles, and set how many, unless a launcher has done so."""
    job = JobEnvironment.read()
    unknown = [role for role in roles if role not in job.counts]
    if not job.registry or not unknown:
        return
    with closing(Directory(job.master, Security.from_environment())) as directory:
        for role in unknown:
            try:
                count = directory.count(role, _ATTEMPT)
            except WireError:
                where = f"the registry {job.registry}, of PERSIA_NATS_URL"
                _log.warning("Waiting for the first %s at %s.", role, where)
                count = directory.count(role, _FOUND_WITHIN)
            set_variables(os.environ, {count_name(role): count})


def connect(staleness: int | None) -> None:
    """Connect to the job, unless the program has done so itself.

    staleness: batches between a lookup and its gradient, at most; None: as the job says. Without servers
    every lookup sees all gradients before it, as with 1.
    """
    current = distributed.current()
    capacity = read_global_config().capacity
    if current.chosen and current.settings.kind != "memory":  # which is also what `disconnect` leaves
        return
    if join_job():
        wait_for_roles(Role.PARAMETER_SERVER, Role.EMBEDDING_WORKER)
        mode = None if staleness is None else "sync" if staleness == 1 else "hybrid"
        distributed.connect("remote", mode=mode, staleness=staleness)
    elif get_world_size() > 1:
        distributed.connect("sharded", capacity=capacity)
    elif current.settings.capacity != capacity:
        distributed.connect("memory", capacity=capacity)


# `persia.distributed`: how trainers keep their dense parameters equal, as `dense_reduce` of Karvan.

_MEETING = "trainers meet through the registry of their job, or as torchrun says."
_ALGORITHM = "gradient_allreduce"  # whose result is the mean
_NEIGHBOURS = "trainers average with some neighbours; the nearest is kv.TrainContext(average_every=n)."
_REFUSED = {
    "bytegrad": "it sends gradients in 8 bits; the nearest is kv.TrainContext(dense_reduce='bf16').",
    "qadam": "it sends the momentum of its own Adam in 8 bits; the nearest is "
    "kv.TrainContext(dense_reduce='powersgd').",
    "decentralized": _NEIGHBOURS,
    "low_precision_decentralized": _NEIGHBOURS,
    "async": "trainers average their parameters in the background; the nearest is "
    "kv.TrainContext(average_every=n), or mode async of a job.",
}


class DistributedBaseOption:
    """How the dense gradients of trainers become one."""

    dense_reduce: DenseReduce = "mean"

    def __init__(self, master_port: int, master_addr: str | None = None) -> None:
        self.master_port = master_port
        self.master_addr = master_addr
        warn_of_tuning(_MEETING, master_port=(master_port, 23456), master_addr=(master_addr, None))


class DDPOption(DistributedBaseOption):
    """The mean of all gradients, by torch's DistributedDataParallel.

    Karvan chooses the backend by where tensors are: nccl for those on GPUs, gloo for others.
    """

    def __init__(
        self,
        initialization_method: str = "tcp",
        backend: str = "nccl",
        *,
        master_port: int = 23456,
        master_addr: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(master_port, master_addr)
        initialization_method = options.pop("init_method", initialization_method)
        if backend not in ("nccl", "gloo"):
            raise ValueError(f"DDPOption expects a backend of nccl, gloo, got {backend!r}.")
        if initialization_method not in ("tcp", "file"):
            raise ValueError(
                f"DDPOption expects an initialization_method of tcp, file, got {initialization_method!r}."
            )
        if options:
            raise unsupported(f"DDPOption({', '.join(options)})", _MEETING)
        self.backend = backend
        self.initialization_method = initialization_method


class BaguaDistributedOption(DistributedBaseOption):
    """An algorithm of Bagua that Karvan has: gradient_allreduce."""

    def __init__(self, algorithm: str, **options: Any) -> None:
        super().__init__(options.pop("master_port", 23456), options.pop("master_addr", None))
        if algorithm in _REFUSED:
            raise unsupported(f"BaguaDistributedOption({algorithm!r})", _REFUSED[algorithm])
        if algorithm != _ALGORITHM:
            allowed = ", ".join([_ALGORITHM, *_REFUSED])
            raise ValueError(f"BaguaDistributedOption expects one of {allowed}, got {algorithm!r}.")
        if options:
            raise unsupported(f"BaguaDistributedOption({', '.join(options)})", "torch chooses its buckets.")
        self.algorithm = algorithm


def get_default_distributed_option(device_id: int | None = None) -> DDPOption:
    """The mean of all gradients."""
    return DDPOption(backend="gloo" if device_id is None or not torch.cuda.is_available() else "nccl")


# `persia.utils`: seeds, YAML files, free ports; and loggers of the standard library with PERSIA's names.


def setup_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, and have torch choose deterministic algorithms."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)


def load_yaml(filepath: str) -> Any:
    """The content of a YAML file."""
    if not Path(filepath).exists():
        raise FileNotFoundError(f"Expected a YAML file, but {filepath} does not exist.")
    return parse(Path(filepath).read_text())


def dump_yaml(content: Any, filepath: str) -> None:
    """Write a YAML file."""
    Path(filepath).write_text(yaml.safe_dump(content, sort_keys=False))


def find_free_port(port: int = 10000, interval: int = 1) -> int:
    """The first port of the local machine that is free: this one, or the next ones at this interval."""
    check_counts(1, interval=interval)
    for wanted in range(port, 65536, interval):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", wanted))
            return wanted
    raise ValueError(f"Expected a free port from {port} to 65535, found none.")


_FORMAT = "%(asctime)s %(levelname)-8s [%(filename)s:%(lineno)d] %(message)s"


def log_level() -> int:
    """LOG_LEVEL of the environment: trace, debug, info (the default), warn or error."""
    named = os.environ.get("LOG_LEVEL", "").strip() or "info"
    levels = {"TRACE": logging.DEBUG, **logging.getLevelNamesMapping()}
    if named.upper() not in levels:
        raise ValueError(f"LOG_LEVEL expects trace, debug, info, warn or error, got {named!r}.")
    return levels[named.upper()]


def get_logger(name: str) -> logging.Logger:
    """A logger that writes to stderr, at LOG_LEVEL of the environment (info)."""
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.setLevel(log_level())
        logger.propagate = False
    return logger


def get_default_logger(name: str | None = None) -> logging.Logger:
    """The logger of that name."""
    return get_logger(name or "log")
