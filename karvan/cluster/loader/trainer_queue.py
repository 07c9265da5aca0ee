"""A loader's queue for one trainer: its position, and the batches that wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from karvan.wire import Message

EpochIndex = tuple[int, int]  # epoch and index


class Known(NamedTuple):
    """A batch at which reading can start, and the source's position before it."""

    begin: EpochIndex
    position: Any


class Item(NamedTuple):
    """What a trainer receives: a batch, or the end of an epoch."""

    epoch: int
    message: Message
    ends: bool = False


@dataclass(eq=False)
class TrainerQueue:
    """What waits for one trainer of a run.

    filled: all batches before it are in the queue, or not needed. taken: later batches that trainers of an
    earlier run have had. asked: the newest epoch that it has asked for. error_sent: whether it has received
    the error. watches: whether it has called `stay`. unread: batches that it has, but is not done with, and
    whose ids this loader has still to read, because it replaces the one that sent them.
    """

    run: str
    ids: list[str]
    filled: EpochIndex
    taken: frozenset[EpochIndex]
    positions: list[Known]
    asked: int = -1
    items: deque[Item] = field(default_factory=deque)
    error_sent: bool = False
    watches: bool = False
    left: bool = False
    unread: set[EpochIndex] = field(default_factory=set)

    @classmethod
    def of(cls, hello: Mapping[str, Any]) -> TrainerQueue:
        """The queue of a trainer, from what its hello asks for."""
        epoch, end, before = hello["epoch"], hello["end"], hello["before_unfinished"]
        queue = cls(
            hello["run"],
            hello["ids"],
            (epoch, hello["next"]),
            frozenset((epoch, index) for index in hello["taken"]),
            [Known((epoch, index), position) for index, position in hello["positions"]],
        )
        if end is not None:
            queue.end(epoch, *end)
            queue.positions.append(Known(queue.filled, end[1]))
        queue.unread = {(epoch, index) for epoch, index in hello["unfinished"]}
        if before is not None:
            queue.positions.append(Known((before[0], before[1]), before[2]))
        return queue

    @property
    def oldest(self) -> EpochIndex:
        """The first batch that has to be read for this trainer."""
        return min(self.filled, *self.unread) if self.unread else self.filled

    def wants(self, begin: EpochIndex) -> bool:
        """Whether the trainer has not had this batch yet."""
        return begin >= self.filled and begin not in self.taken

    def first(self, epoch: int) -> Item | None:
        """The next item of an epoch; drops those of earlier epochs."""
        while self.items and self.items[0].epoch < epoch:
            self.items.popleft()
        return self.items[0] if self.items and self.items[0].epoch == epoch else None

    def end(self, epoch: int, total: int, position: Any) -> None:
        """The epoch has `total` batches, and the source is at `position` after them."""
        message = Message({"epoch": epoch, "end": total, "position": position})
        self.items.append(Item(epoch, message, ends=True))
        self.filled = (epoch + 1, 0)
