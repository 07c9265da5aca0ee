"""`ShardedCudaStore`: every rank owns a range of the key hashes of every table, on its GPU.

A lookup is that of `ShardedStore`, on the device: a rank finds the distinct keys of its batch, sorted by
owner (`KeyRequest`); there is one exchange of numbers of keys and one of keys, for all tables together. The
owner looks up the keys of all ranks (`DeviceOwner`) and sends vectors back in the order of the keys. The rank
pools them straight from the message. Gradients, summed by key, take one exchange more. The owner adds them up
in the order of ranks, so results are the same from run to run.

The sizes of messages depend on the batch, so the host waits for the device once a batch, in `prepare`, which
the feed calls ahead on its own thread. Which tables have gradients is exchanged between the hosts, without
the device. Between GPUs nothing else waits.

As in `CudaStore`, a gradient that is not finite skips its row, not its table: the same row on all ranks, as
one rank owns it.

`lookup`, `apply`, `prepare`, `forward`, `hold` and the constructor are collectives: all ranks call them, in
the same order on each channel. Everything else concerns this rank's share alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from karvan import distributed
from karvan.distributed import Connection
from karvan.store.cuda import launch
from karvan.store.cuda.key_request import KeyRequest
from karvan.store.cuda.row_owner import UNIT, DeviceOwner, OwnerLookup, Sections
from karvan.store.cuda.store import CudaStore, DeviceGradients, DeviceInputs
from karvan.store.cuda.table_memory import TableMemory
from karvan.store.program import (
    LookupInputs,
    LookupPlan,
    LookupProgram,
    MadeOutputs,
    Passes,
    Prepared,
)
from karvan.store.sharded import RankShare
from karvan.store.types import Counts, Found, Keys, LateGradients, LookupContext, PerTable, Rules

# How tensors on a device go to other ranks: by NCCL between GPUs, or through the memory of the machine.
#
# NCCL refuses ranks that share a GPU, so the ranks compare theirs once. It wants all ranks to start their
# operations in one order. Only the thread that computes uses it, therefore, with the group that
# DistributedDataParallel uses, too; what other threads send while it computes goes through memory, over the
# connection's channels.


class MemoryTransport:
    """Sends tensors through the memory of the machine; the calling thread waits for the device."""

    def __init__(self, connection: Connection, device: torch.device) -> None:
        self.connection = connection
        self.device = device

    @property
    def waits(self) -> bool:
        """Whether the calling thread waits for the device."""
        return self.device.type == "cuda"

    def find_any(self, flag: Tensor) -> None:
        """Set a float to 1 if it is 1 on any rank, else to 0."""
        flag.fill_(float(self.connection.here.sum(flag.reshape(1).long().cpu())[0] > 0))

    def exchange(self, send: Tensor, to: Sequence[int], of: Sequence[int], out: Tensor) -> None:
        """Send to[r] elements to rank r, and receive of[r] from it, into `out`."""
        channel = self.connection.here
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
            raise self.connection.explained(error) from error

    @override
    def exchange(self, send: Tensor, to: Sequence[int], of: Sequence[int], out: Tensor) -> None:
        if self.connection.here is not self.connection.main:
            super().exchange(send, to, of, out)
            return
        try:
            dist.all_to_all_single(out, send, list(of), list(to))
        except RuntimeError as error:
            raise self.connection.explained(error) from error


def make_transport(connection: Connection, device: torch.device) -> MemoryTransport:
    """The transport of a device's tensors; a collective."""
    mine = {"device": str(device), "nccl": False}
    if device.type == "cuda":
        mine["device"] = str(torch.cuda.get_device_properties(device).uuid)
        mine["nccl"] = dist.is_initialized() and "cuda:nccl" in dist.get_backend_config()
    ranks = connection.main.gather_json(mine)
    distinct = len({rank["device"] for rank in ranks}) == len(ranks)
    if distinct and all(rank["nccl"] for rank in ranks):
        return NcclTransport(connection, device)
    return MemoryTransport(connection, device)


@dataclass(eq=False)
class RankGradients(LateGradients):
    """Gradients that the owners of their rows have received; `touched` is the same on all ranks."""

    answer: OwnerLookup
    held: DeviceGradients
    _transport: MemoryTransport
    _checked: list[bool] | None = None

    def check_finite(self) -> list[bool]:
        """Whether the gradients of each table are finite on all ranks; waits for the device; a collective."""
        if self._checked is None:
            bad = torch.tensor([not good for good in self.held.check_finite()], dtype=torch.int64)
            self._checked = [not count for count in self._transport.connection.here.sum(bad).tolist()]
        return self._checked

    @override
    def tensors(self, slots: Collection[int]) -> list[Tensor] | None:
        """Those that this rank has received; at least one, as on any rank."""
        if self._transport.waits:
            return None
        received = self.held.tensors(slots)
        some = any(tensor.numel() for tensor in received)
        return received if some else [torch.zeros(1, device=self._transport.device)]

    @override
    def agree(self, found_inf: Tensor) -> None:
        """A collective."""
        self._transport.find_any(found_inf)

    @override
    def skip_if(self, found_inf: Tensor) -> None:
        self.held.skip_if(found_inf)


class RoutedRequest:
    """A batch whose keys have been sent to their owners."""

    plan = None

    def __init__(self, request: KeyRequest, asked: Sections, message: Tensor) -> None:
        self.request = request
        self.asked = asked
        self.message = message
        self.expected: DeviceInputs | None = None  # the message's keys, until they are looked up
        self.made = launch.Handover(message.device, [message, *request.tensors()])


@dataclass(eq=False)
class DeviceRankLookup(MadeOutputs):
    """A batch after its lookup: what this rank has asked for, and what it has answered to all."""

    request: KeyRequest
    answer: OwnerLookup


class ShardedCudaStore(RankShare):
    """Tables that are spread over the GPUs of a connection's ranks; on "cpu", in Triton's interpreter.

    device_memory: see `CudaStore`, for each rank.
    """

    takes_tensors = True

    def __init__(
        self,
        connection: distributed.Connection,
        device: torch.device | str = "cuda",
        device_memory: int | None = None,
    ) -> None:
        self._tables = CudaStore(device, device_memory)
        self.device = self._tables.device
        super().__init__(connection, self._tables)
        self._owner = DeviceOwner(self._tables)
        self._transport = make_transport(connection, self.device)
        self._memories: dict[str, TableMemory] = {}  # of requests, by channel: one thread uses each

    @override
    def prepare(
        self, program: LookupProgram, inputs: LookupInputs, context: LookupContext | None = None
    ) -> Prepared:
        """Keys are sent to their owners now, so all ranks prepare a batch, or none.

        The calling thread waits for the device, once, for what is queued on its stream.
        """
        batch = self._tables.prepare(program, inputs)
        assert isinstance(batch, DeviceInputs)
        training = context is not None and context.training
        routed = self._route(batch, len(program.tables), grouped=training)
        if training:
            routed.expected = self._owner.expect(program.tables, routed.asked, routed.message)
        return routed

    def _route(self, batch: DeviceInputs, slots: int, *, grouped: bool) -> RoutedRequest:
        channel = self._connection.here
        request = KeyRequest(batch, slots, self._ranks, self._memory())
        requested = request.sections
        before = channel.bytes_sent
        received = channel.swap(torch.from_numpy(np.ascontiguousarray(requested.counts)))
        self.bytes_sent += channel.bytes_sent - before
        asked = Sections(received.numpy(), requested.dims)
        self.crossing_keys += requested.keys - requested.keys_of[self._connection.rank]
        message = self._exchange(request.message, requested.words_of, asked.words_of)
        if grouped:
            request.group_runs()
        return RoutedRequest(request, asked, message)

    def _memory(self) -> TableMemory:
        name = self._connection.here.name
        if name not in self._memories:
            self._memories[name] = TableMemory(self.device)
        return self._memories[name]

    def _exchange(self, send: Tensor, to: list[int], of: list[int], out: Tensor | None = None) -> Tensor:
        self.bytes_sent += (sum(to) - to[self._connection.rank]) * send.element_size()
        received = send.new_empty(sum(of)) if out is None or out.dtype is not send.dtype else out
        self._transport.exchange(send, to, of, received)
        if out is None or out is received:
            return received
        return out.copy_(received)

    @override
    def forward(
        self, program: LookupProgram, inputs: LookupInputs | Prepared, context: LookupContext
    ) -> LookupPlan:
        if isinstance(inputs, tuple):
            inputs = self.prepare(program, inputs, context)
        assert isinstance(inputs, RoutedRequest)
        inputs.made.receive()
        inputs.expected = None
        return self._look_up(program.tables, inputs, context)

    def _look_up(self, tables: Sequence[str], routed: RoutedRequest, context: LookupContext) -> LookupPlan:
        request = routed.request
        answer, vectors = self._owner.lookup(tables, routed.asked, routed.message, context)
        front, requested = request.front * UNIT, request.sections
        received = torch.empty(front + requested.floats, dtype=torch.float32, device=self.device)
        received[:front].zero_()
        self._exchange(vectors.to(self._wire), routed.asked.floats_of, requested.floats_of, received[front:])
        outs = request.pool(received, self._memory())
        lookup = DeviceRankLookup(outs, request.batch.out_layouts, request, answer)
        return LookupPlan(None, answer.plan.versions, lookup)

    @override
    def hold(
        self, plan: LookupPlan, gradients: Sequence[Tensor | None], scale: float | Tensor = 1.0
    ) -> RankGradients:
        """This is a collective.

        The hosts tell each other which tables have gradients, and which features have none. Only if some keys
        of a table have a gradient and others not, it is sent which ones.
        """
        lookup = plan.remote
        assert isinstance(lookup, DeviceRankLookup)
        request, answer = lookup.request, lookup.answer
        slots = len(request.sections.dims)
        flags = torch.zeros(2, slots, dtype=torch.int64)  # has gradients, lacks some
        for feature, gradient in zip(request.batch.layout.shapes, gradients, strict=True):
            if feature.cells:
                flags[int(gradient is None), feature.slot] = 1
        touched, lacking = (self._connection.here.sum(flags) > 0).tolist()
        divisor = scale * self._ranks if self._averages else scale
        sums = request.sum_gradients(gradients, divisor, self._memory())
        to, of = request.sections, answer.sections
        received = self._exchange(sums.to(self._wire), to.floats_of, of.floats_of).float()
        present = None
        if any(has and lacks for has, lacks in zip(touched, lacking, strict=True)):
            present = self._exchange(request.present(gradients), to.keys_of, of.keys_of)
        answered = self._owner.hold(answer, received, present, by_key=self._by_key)
        return RankGradients([True] * slots, touched, answer, answered, self._transport)

    @override
    def update(
        self, program: LookupProgram, gradients: Passes[RankGradients], rules: Rules, steps: PerTable
    ) -> None:
        """The owners have the gradients already."""
        passes = [(sums.answer.plan, sums.held) for _, sums in gradients]
        self._tables.update(gradients[0][1].answer.program, passes, rules, steps)

    @override
    def lookup(self, keys: Mapping[str, tuple[Keys, Counts]], context: LookupContext) -> dict[str, Found]:
        """A collective."""
        routed = self._route(self._tables.inputs_of_keys(keys), len(keys), grouped=False)
        plan = self._look_up(list(keys), routed, context)
        assert isinstance(plan.remote, DeviceRankLookup)
        return {
            table: Found(out.cpu().numpy(), self.table(table).version)
            for table, (out, _) in zip(keys, plan.remote.take(), strict=True)
        }
