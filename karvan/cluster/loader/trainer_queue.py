"""A loader's queue for one trainer: its position, and the batches that wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from karvan.wire import Message

Place = tuple[int, int]  # epoch and index


class Known(NamedTuple):
    """A place from which reading can begin, and the source's position before it."""

    place: Place
    position: Any


class Item(NamedTuple):
    """What a trainer is given: a batch, or the end of an epoch."""

    epoch: int
    message: Message
    ends: bool = False


@dataclass(eq=False)
class TrainerQueue:
    """What waits for one trainer of a run.

    filled: all batches before it are in the queue, or not wanted. taken: batches behind it that trainers of
    an earlier run have had. asked: the newest epoch that it has asked for. told: whether it knows of an
    error. watches: whether it has asked to stay.
    """

    run: str
    ids: list[str]
    filled: Place
    taken: frozenset[Place]
    positions: list[Known]
    asked: int = -1
    items: deque[Item] = field(default_factory=deque)
    told: bool = False
    watches: bool = False
    left: bool = False

    @classmethod
    def of(cls, hello: Mapping[str, Any]) -> TrainerQueue:
        """That of a trainer which says what it needs."""
        epoch, end = hello["epoch"], hello["end"]
        made = cls(
            hello["run"],
            hello["ids"],
            (epoch, hello["next"]),
            frozenset((epoch, index) for index in hello["taken"]),
            [Known((epoch, index), position) for index, position in hello["positions"]],
        )
        if end is not None:
            made.end(epoch, *end)
            made.positions.append(Known(made.filled, end[1]))
        return made

    def wants(self, place: Place) -> bool:
        """Whether a batch is one that it has not had yet."""
        return place >= self.filled and place not in self.taken

    def first(self, epoch: int) -> Item | None:
        """What it gets next of an epoch; all of those before are not wanted any more."""
        while self.items and self.items[0].epoch < epoch:
            self.items.popleft()
        return self.items[0] if self.items and self.items[0].epoch == epoch else None

    def end(self, epoch: int, total: int, position: Any) -> None:
        """The epoch has so many batches, and the source this position behind them."""
        told = Message({"epoch": epoch, "end": total, "position": position})
        self.items.append(Item(epoch, told, ends=True))
        self.filled = (epoch + 1, 0)
