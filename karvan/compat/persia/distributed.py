"""`persia.distributed`: how trainers keep their dense parameters equal, as `dense_reduce` of Karvan."""

from __future__ import annotations

from typing import Any

import torch

from karvan.compat.persia.bridge.unsupported import Tuning, unsupported, warn_of_tuning
from karvan.dense.communication import DenseReduce

_BACKENDS = ("nccl", "gloo")
_METHODS = ("tcp", "file")
_MEETING = "trainers meet through the registry of their job, or as torchrun says."
_DENSE_REDUCES: dict[str, DenseReduce] = {"gradient_allreduce": "mean"}
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
        warn_of_tuning(
            Tuning("master_port", master_port, 23456, _MEETING),
            Tuning("master_addr", master_addr, None, _MEETING),
        )


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
        if backend not in _BACKENDS:
            raise ValueError(f"DDPOption expects a backend of {', '.join(_BACKENDS)}, got {backend!r}.")
        if initialization_method not in _METHODS:
            raise ValueError(
                f"DDPOption expects an initialization_method of {', '.join(_METHODS)}, "
                f"got {initialization_method!r}."
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
        if algorithm not in _DENSE_REDUCES:
            known = ", ".join([*_DENSE_REDUCES, *_REFUSED])
            raise ValueError(f"BaguaDistributedOption expects one of {known}, got {algorithm!r}.")
        if options:
            raise unsupported(f"BaguaDistributedOption({', '.join(options)})", "torch chooses its buckets.")
        self.algorithm = algorithm
        self.dense_reduce = _DENSE_REDUCES[algorithm]


def get_default_distributed_option(device_id: int | None = None) -> DDPOption:
    """The mean of all gradients."""
    return DDPOption(backend="gloo" if device_id is None or not torch.cuda.is_available() else "nccl")
