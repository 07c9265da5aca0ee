"""`Lane`: collectives of one thread with its likes on the other ranks.

Every rank calls the same methods of a lane in the same order. What travels are bytes and numbers in the CPU's
memory, never pickles. A process that is alone has lanes, too: nothing is sent, and nobody has to ask.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Lane:
    """The lane of a process that is alone; `SharedLane` derives from it."""

    rank = 0
    world = 1

    def __init__(self, name: str) -> None:
        self.name = name
        self.operations = 0  # collectives so far
        self.bytes_sent = 0  # to other ranks, without what the transport adds

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.sum(torch.zeros(1))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; `values` stay as they are."""
        return values.clone()

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, in the order of ranks."""
        return [data]

    def gather_json(self, value: Any) -> list[Any]:
        """The same for anything that JSON can say."""
        return [json.loads(data) for data in self.gather(json.dumps(value).encode())]

    def swap(self, numbers: Tensor) -> Tensor:
        """Row r of `numbers`, (world, n), goes to rank r; row r of the result comes from there."""
        return numbers.clone()

    def exchange(self, send: Tensor, to: Sequence[int], of: Sequence[int]) -> Tensor:
        """Pieces of a flat tensor to all ranks: to[r] elements go to rank r, of[r] come from there."""
        return send


class SharedLane(Lane):
    """A lane over a process group that nobody else uses."""

    def __init__(
        self, name: str, group: dist.ProcessGroup, explain: Callable[[Lane, Exception], Exception]
    ) -> None:
        super().__init__(name)
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._group = group
        self._explain = explain

    def sum(self, values: Tensor) -> Tensor:
        """See `Lane.sum`."""
        total = values.clone()
        self._do(lambda: dist.all_reduce(total, group=self._group))
        self.bytes_sent += 2 * total.nbytes * (self.world - 1) // self.world
        return total

    def gather(self, data: bytes) -> list[bytes]:
        """See `Lane.gather`."""
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(data)
        sizes = self.sum(sizes)
        longest = int(sizes.max())
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
        all_of_them = [torch.empty_like(mine) for _ in range(self.world)]
        if longest:
            self._do(lambda: dist.all_gather(all_of_them, mine, group=self._group))
            self.bytes_sent += longest * (self.world - 1)
        return [bytes(one[:size].numpy()) for one, size in zip(all_of_them, sizes.tolist(), strict=True)]

    def swap(self, numbers: Tensor) -> Tensor:
        """See `Lane.swap`."""
        received = torch.empty_like(numbers)
        self._do(lambda: dist.all_to_all_single(received, numbers.contiguous(), group=self._group))
        self.bytes_sent += numbers[0].nbytes * (self.world - 1)
        return received

    def exchange(self, send: Tensor, to: Sequence[int], of: Sequence[int]) -> Tensor:
        """See `Lane.exchange`."""
        received = send.new_empty(sum(of))
        self._do(lambda: dist.all_to_all_single(received, send, list(of), list(to), group=self._group))
        self.bytes_sent += (sum(to) - to[self.rank]) * send.element_size()
        return received

    def _do(self, operation: Callable[[], T]) -> T:
        self.operations += 1
        try:
            return operation()
        except (RuntimeError, ValueError) as error:
            raise self._explain(self, error) from error
