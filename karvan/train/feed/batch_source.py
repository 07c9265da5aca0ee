"""Takes batches from data one by one, each with the position after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from karvan.data import merge
from karvan.train.pair import as_batch
from karvan.train.types import Positioned

_log = logging.getLogger("karvan.train")

Within: TypeAlias = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class FedBatch:
    """A batch that is ready, and the data's position after it: None if data has no positions.

    Where several ranks train, `samples` are those of the batch, `all_samples` and `all_batches` those of all
    ranks in the same round, and `save` says that a checkpoint is due. A round without any batch has None.
    """

    batch: Any
    position: Any
    samples: int = 0
    all_samples: int = 0
    all_batches: int = 1
    save: bool = False


class BatchSource:
    """Takes the batches of a single process; `RankBatchSource` derives from it."""

    alone = True
    reason: str | None = None  # why all ranks stop, once they have agreed to
    cut = False  # whether ranks ended before their data did, so that a batch may be lost

    def __init__(
        self, data: Iterable[Any], place: Callable[[Any], Any], skip: int, within: Within = nullcontext
    ) -> None:
        self._taken = _take(data, place, skip)
        self._within = within

    def next(self, stop: str | None = None) -> FedBatch | None:
        """The next batch; None at the end, or if `stop` says why there should be none."""
        with self._within():
            return None if stop else next(self._taken, None)

    def leave(self) -> None:
        """No more batches are needed."""

    def fail(self, error: BaseException) -> None:
        """Something has failed on this rank, and others may wait for it."""

    def close(self) -> None:
        """Release the data."""
        self._taken.close()


def position_of(data: Any) -> Any:
    """The position of the data, or None if it has none."""
    try:
        return data.state_dict() if isinstance(data, Positioned) else None
    except TypeError as error:  # a Stream has the method, but cannot answer for an iterable that has none
        _log.debug("%s", error)
        return None


def merged_position(data: Any, positions: Sequence[Any]) -> Any:
    """The positions of all ranks as one, joined by the data's own `merge` if it has one; None if any is."""
    if len(positions) == 1 or any(position is None for position in positions):
        return positions[0] if len(positions) == 1 else None
    return getattr(data, "merge", merge)(positions)


def move_back(data: Any, position: Any) -> None:
    """Move data that was left early back to a position, if it has any, so that reading continues there."""
    if position is None:
        return
    try:
        data.load_state_dict(position)
    except RuntimeError as error:  # a stream cannot go back
        _log.warning("Prefetched batches are lost: %s", error)


def _take(data: Iterable[Any], place: Callable[[Any], Any], skip: int) -> Generator[FedBatch, None, None]:
    batches = iter(data)
    try:
        skipped = sum(1 for _ in islice(batches, skip))
        if skipped < skip:
            raise ValueError(
                f"This epoch has trained {skip} batches before, and the data must give them again to be "
                f"skipped, but it ended after {skipped}: it is not the data that training started with."
            )
        for batch in batches:
            position = position_of(data)
            yield FedBatch(place(as_batch(batch)), position)
    finally:
        getattr(batches, "close", lambda: None)()
