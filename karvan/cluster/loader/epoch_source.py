"""The batches of an epoch that a loader reads, starting at a position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from karvan.cluster.loader.service import LoaderService, Start
from karvan.cluster.loader.statistics import LoaderStatistics
from karvan.devices import require_cpu_batches
from karvan.ragged import Batch
from karvan.train.types import Positioned

Batches = Iterable[Any] | Callable[[int], Iterable[Any]]


def serve(service: LoaderService, batches: Batches, statistics: LoaderStatistics | None = None) -> None:
    """Send batches for as long as trainers ask for epochs; until the service is closed.

    statistics: of the transforms that make the batches.
    """
    require_cpu_batches(batches)
    source = _PerEpoch(batches) if callable(batches) else _Iterated(batches)
    known = getattr(batches, "identity", lambda: None)()
    service.identify(None if known is None else known.state(), statistics)
    while (start := service.begin()) is not None:
        batches_of_epoch = source.batches(start)
        try:
            for batch in batches_of_epoch:
                if not service.send(as_batch(batch), source.position()):
                    break
            else:
                if service.end(source.end()):
                    source.ended(start.epoch)
        finally:
            getattr(batches_of_epoch, "close", lambda: None)()


def as_batch(batch: Any) -> Batch:
    """The same batch, after a check that all features have the same number of samples."""
    return batch if isinstance(batch, Batch) else Batch(batch)


class _Iterated:
    """Something that gives an epoch whenever it is iterated."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self._begin = self.position()
        self._next: int | None = 0  # the epoch that the next iteration gives; None: one is in progress

    def batches(self, start: Start) -> Iterator[Any]:
        """Batches from `start`; without a position all of the epoch."""
        moved = False
        if (start.epoch, start.index) != (self._next, 0):
            position = self._begin if start == Start(0, 0, None) else start.position
            if position is not None:
                assert isinstance(self._source, Positioned)  # the position came from it
                self._source.load_state_dict(position)
                moved = start.index == 0
            elif hasattr(self._source, "start_epoch"):
                self._source.start_epoch(start.epoch)
            elif self._begin is not None:
                raise RuntimeError(f"Epoch {start.epoch} expects a position to begin at, got none.")
        self._next = None
        empty = True
        for batch in self._source:
            empty = False
            yield batch
        if empty and moved and start.epoch:
            yield from self._source  # it was moved to the end of the previous epoch, which had nothing left

    def position(self) -> Any:
        """The position after the last batch; None if the source has none."""
        return getattr(self._source, "state_dict", lambda: None)()

    def end(self) -> Any:
        """The position at which the next epoch begins."""
        return self.position()

    def ended(self, epoch: int) -> None:
        """An epoch was read to its end."""
        self._next = epoch + 1


class _PerEpoch:
    """A function from the number of an epoch to its batches."""

    def __init__(self, make: Callable[[int], Iterable[Any]]) -> None:
        self._make = make
        self._source: Any = None

    def batches(self, start: Start) -> Iterator[Any]:
        """Make the source of an epoch, and iterate it from the start or a position."""
        self._source = self._make(start.epoch)
        if start.position is not None:
            self._source.load_state_dict(start.position)
        yield from self._source

    def position(self) -> Any:
        """The source's position, if it has one."""
        return getattr(self._source, "state_dict", lambda: None)()

    def end(self) -> Any:
        """Each epoch has a source of its own, so there is no position."""
        return None

    def ended(self, epoch: int) -> None:
        """Nothing remains of an epoch."""
        pass
