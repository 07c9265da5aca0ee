"""`connect_ranks`: the rows of a RecIS program are in its process, or sharded over torchrun's ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from karvan import distributed
from karvan.compat.cuda_fallback import device_of
from karvan.compat.unsupported import UnsupportedError

_REDUCES = {"worker": "mean", "worker_sum": "sum", "id": "key"}


def connect_ranks(grad_reduce_by: str | None = None, device: torch.device | str = "cpu") -> None:
    """Connect the ranks of a program, unless that has been done; called before tables are made.

    grad_reduce_by: "worker" divides a row's gradients by the number of ranks, "id" by the number of those
    that had the id, "worker_sum" not at all. All tables of a program have the same. None: as they have it.
    device: where the rows of ranks are, of all tables; of a single process each table has its own.
    """
    if grad_reduce_by is not None and grad_reduce_by not in _REDUCES:
        raise UnsupportedError(
            f'grad_reduce_by="{grad_reduce_by}"', f"expected one of {', '.join(_REDUCES)}."
        )
    reduce = _REDUCES[grad_reduce_by or "worker"]
    connection = distributed.current()
    if not connection.chosen or connection.settings.kind == "memory":  # which `disconnect` leaves, too
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1:
            distributed.connect("sharded", grad_reduce=reduce, device=device_of(device).type)
    elif grad_reduce_by and connection.world_size > 1 and connection.settings.grad_reduce != reduce:
        raise UnsupportedError(
            f'grad_reduce_by="{grad_reduce_by}" beside tables with another one',
            "expected the same for all tables of a program.",
        )


def table_device(device: torch.device | str) -> str | None:
    """Where the rows of a table are, in the words of `kv.Table`."""
    kind, settings = device_of(device).type, distributed.current().settings
    if kind not in ("cpu", "cuda"):
        raise UnsupportedError(f'device="{kind}" of a table', 'expected "cpu" or "cuda".')
    if settings.kind != "sharded":
        return "cuda" if kind == "cuda" else None
    if kind != settings.device:
        raise UnsupportedError(
            f'device="{kind}" of a table beside tables with device="{settings.device}"',
            "expected the same for all tables of a program with several ranks.",
        )
    return None


def shared_seed() -> int:
    """The seed of `torch.manual_seed`, that of rank 0 on all ranks: new rows are a function of it."""
    seed = torch.initial_seed()
    return int(distributed.current().main.gather_json(seed)[0])
