"""How tensors on a device go to other ranks: by NCCL between GPUs, or through the memory of the machine.

NCCL refuses ranks that share a GPU, so the ranks compare theirs once. It wants all ranks to start their
operations in one order. Only the thread that computes uses it, therefore, with the group that
DistributedDataParallel uses, too; what other threads send while it computes goes through memory, over the
connection's channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from karvan.distributed import Connection


class MemoryTransport:
    """Sends tensors through the memory of the machine; the calling thread waits for the device."""

    def __init__(self, connection: Connection, device: torch.device) -> None:
        self._connection = connection
        self.device = device

    @property
    def waits(self) -> bool:
        """Whether the calling thread waits for the device."""
        return self.device.type == "cuda"

    def find_any(self, flag: Tensor) -> None:
        """Set a float to 1 if it is 1 on any rank, else to 0."""
        flag.fill_(float(self._connection.here.sum(flag.reshape(1).long().cpu())[0] > 0))

    def exchange(self, send: Tensor, to: Sequence[int], of: Sequence[int], out: Tensor) -> None:
        """Send to[r] elements to rank r, and receive of[r] from it, into `out`."""
        channel = self._connection.here
        if self.device.type != "cuda":
            out.copy_(channel.exchange(send, to, of))
            return
        staging = torch.empty(send.shape, dtype=send.dtype, pin_memory=True)
        staging.copy_(send, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        out.copy_(channel.exchange(staging, to, of).pin_memory(), non_blocking=True)


class NcclTransport(MemoryTransport):
    """Sends tensors from GPU to GPU, on the thread that computes; nothing waits for the device."""

    @property
    @override
    def waits(self) -> bool:
        return False

    @override
    def find_any(self, flag: Tensor) -> None:
        try:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        except RuntimeError as error:
            raise self._connection.explained(error) from error

    @override
    def exchange(self, send: Tensor, to: Sequence[int], of: Sequence[int], out: Tensor) -> None:
        if self._connection.here is not self._connection.main:
            super().exchange(send, to, of, out)
            return
        try:
            dist.all_to_all_single(out, send, list(of), list(to))
        except RuntimeError as error:
            raise self._connection.explained(error) from error


def make_transport(connection: Connection, device: torch.device) -> MemoryTransport:
    """The transport of a device's tensors; a collective."""
    here = {"device": str(device), "nccl": False}
    if device.type == "cuda":
        here["device"] = str(torch.cuda.get_device_properties(device).uuid)
        here["nccl"] = dist.is_initialized() and "cuda:nccl" in dist.get_backend_config()
    ranks = connection.main.gather_json(here)
    distinct = len({one["device"] for one in ranks}) == len(ranks)
    if distinct and all(one["nccl"] for one in ranks):
        return NcclTransport(connection, device)
    return MemoryTransport(connection, device)
