"""The feed: fetches the next batches in the background while the current one computes.

A thread takes a batch, moves it to the device and prepares it (`place`), and continues until `prefetch`
batches wait. Nothing else changes: batches come in the data's order, an error is raised where its batch would
come, and each batch has the data's position after it, so that prefetched batches are never counted. With
`prefetch` 0 the same happens without a thread.

Where several ranks train, the thread agrees with those of the others on every batch (`RankRounds`). A
request to stop then travels with a batch that no rank has started to take: always the one `prefetch` after
the next, so that all ranks stop at the same step, and at the same one whenever the run is repeated.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from karvan.activity import activity
from karvan.data import merge
from karvan.data.leased_data import LeasedBatches
from karvan.data.loading.pipeline import start
from karvan.data.task_records import TakenRecords, blaming, records_done
from karvan.distributed import CollectiveChannel, Connection, RankError
from karvan.ragged import Batch, IdsReference, NestedRagged, Ragged
from karvan.train.types import FEATURES, LABEL, Pair, Positioned, as_batch, same, samples_of

_log = logging.getLogger("karvan.train")

Within: TypeAlias = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class FedBatch:
    """A batch that is ready, and the data's position after it: None if data has no positions.

    Where several ranks train, `samples` are those of the batch, `all_samples` and `all_batches` those of all
    ranks in the same round, and `save` says that a checkpoint is due. A round without any batch has None.
    `records` are those of leased tasks that the batch contains.
    """

    batch: Any
    position: Any
    samples: int = 0
    all_samples: int = 0
    all_batches: int = 1
    save: bool = False
    records: Sequence[TakenRecords] = ()

    @property
    def done(self) -> dict[int, int]:
        """How many records of each leased task are done with it, by token."""
        return records_done(self.records)


class BatchSource:
    """Hands out the batches of a single process; `RankBatchSource` derives from it."""

    alone: ClassVar[bool] = True
    reason: str | None = None  # why all ranks stop, once they have agreed to
    cut = False  # whether ranks ended before their data did, so that a batch may be lost

    def __init__(self, taken: Generator[FedBatch, None, None], within: Within = nullcontext) -> None:
        self._taken = taken
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


def describe(batch: Any) -> dict[str, Any]:
    """What `empty` needs to know of a batch, for JSON; an unsupported column is an error in `empty`."""
    try:
        columns = [[name, _describe(name, entry)] for name, entry in batch.items()]
    except TypeError as error:
        return {"refused": str(error)}
    described: dict[str, Any] = {"batch": isinstance(batch, Batch), "columns": columns}
    if isinstance(batch, Pair):
        described["pair"] = [_names(batch.features), _names(batch.labels)]
    return described


def empty(description: Mapping[str, Any]) -> Any:
    """A batch without samples.

    Batches without samples, for ranks that wait while others still have data.

    An empty batch has the columns of the others: their kinds, dtypes and trailing shapes. A rank that has had
    a batch knows them; one that never had learns them from another rank, as JSON.
    """
    if "refused" in description:
        raise TypeError(description["refused"])
    entries = {name: _empty(column) for name, column in description["columns"]}
    if "pair" in description:
        features, labels = description["pair"]
        return Pair(_part(FEATURES, features, entries), _part(LABEL, labels, entries))
    return Batch(entries) if description["batch"] else entries


def _names(part: Any) -> list[str] | bool:
    """The names of a pair's features or labels, or whether there are any."""
    return list(part) if isinstance(part, Mapping) else part is not None


def _part(name: str, names: list[str] | bool, entries: Mapping[str, Any]) -> Any:
    if isinstance(names, bool):
        return entries[name] if names else None
    return {name: entries[name] for name in names}


def _describe(name: str, entry: Any) -> dict[str, Any]:
    if isinstance(entry, Tensor):
        return {"kind": "tensor", "values": _like(entry)}
    if isinstance(entry, Ragged):
        weights = None if entry.weights is None else _like(entry.weights)
        offsets = entry.offsets is not None
        return {"kind": "ragged", "values": _like(entry.values), "offsets": offsets, "weights": weights}
    if isinstance(entry, NestedRagged):
        return {"kind": "nested", "values": _like(entry.values)}
    if isinstance(entry, IdsReference):
        return {"kind": "reference"}
    raise TypeError(
        f"Column '{name}': expected a Tensor, Ragged or NestedRagged, got {type(entry).__name__}. A rank "
        "that runs out of data needs an empty batch, and cannot make one of this type."
    )


def _like(tensor: Tensor) -> dict[str, Any]:
    shape = [0, *tensor.shape[1:]] if tensor.dim() else []
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}


def _empty(column: Mapping[str, Any]) -> Any:
    if column["kind"] == "reference":
        return IdsReference(0, "", 0)
    values = _tensor(column["values"])
    if column["kind"] == "tensor":
        return values
    start = torch.zeros(1, dtype=torch.int64)
    if column["kind"] == "nested":
        return NestedRagged(values, start, start.clone())
    weights = None if column["weights"] is None else _tensor(column["weights"])
    return Ragged(values, start if column["offsets"] else None, weights)


def _tensor(like: Mapping[str, Any]) -> Tensor:
    return torch.zeros(like["shape"], dtype=getattr(torch, like["dtype"]))


def always(number: int) -> bool:
    """Every round is this rank's turn."""
    return True


def never() -> bool:
    """Nothing is due."""
    return False


@dataclass(frozen=True)
class RankRounds:
    """Who takes part, on which channel; in which rounds this rank takes a batch, when a checkpoint is due."""

    connection: Connection
    channel: str
    turn: Callable[[int], bool] = always
    save: Callable[[], bool] = never


@dataclass(frozen=True)
class _Agreement:
    samples: int
    batches: int
    may_have_more: int
    asking: int
    ending: int
    saving: int


@dataclass
class RankBatchSource(BatchSource):
    """Takes this rank's batches in rounds with the others; all of it happens on one channel.

    In a round every rank takes a batch, if it is its turn and its data has one more, and then all agree by
    one sum: how many samples and batches there are, how many ranks may have more, and what ranks request.

    | the sum says | all ranks |
    |---|---|
    | some rank has a batch | train in this round, those without one on an empty batch |
    | none has, but some may have more | skip this round |
    | all data has ended | end the epoch |
    | a rank stops, leaves or has failed | end here, and learn why; no rank gets a batch of this round |
    | rank 0's clock says so | save after the step of this round |

    A rank that does not know the columns yet asks, and all send theirs. A rank that leaves early (its goal is
    reached) takes part in one more sum, which ends the rounds of all: no rank is left waiting.
    """

    alone: ClassVar[bool] = False
    data: Iterable[Any]
    place: Callable[[Any], Any]
    rounds: RankRounds
    within: Within = nullcontext

    def __post_init__(self) -> None:
        self._batches: Iterator[Any] | None = None
        self._position = position_of(self.data)
        self._columns: dict[str, Any] | None = None
        self._number = 0  # of the next round
        self._ended = False  # the data
        self._over = False  # the rounds

    @override
    def next(self, stop: str | None = None) -> FedBatch | None:
        """A collective."""
        if self._over:
            return None
        with self.rounds.connection.on(self.rounds.channel) as channel:
            try:
                with self.within():
                    batch = self._take()
                samples = 0 if batch is None else samples_of(batch)
            except BaseException as error:
                self._end(channel, error=f"{type(error).__name__}: {error}")
                raise
            asks = batch is None and self._columns is None
            agreed = self._agree(channel, samples, batch is not None, asks, bool(stop))
            if agreed.ending:
                self._share_reason(channel, reason=stop)
                return None
            if not agreed.may_have_more:
                self._over = True
                return None
            self._number += 1
            if not agreed.batches:
                return FedBatch(None, self._position, all_batches=0)
            if agreed.asking:
                gathered = channel.gather_json(self._columns)
                self._columns = self._columns or next(columns for columns in gathered if columns is not None)
            with self.within():
                placed = self.place(empty(self._columns or {}) if batch is None else batch)
            return FedBatch(
                placed, self._position, samples, agreed.samples, agreed.batches, agreed.saving > 0
            )

    @override
    def leave(self) -> None:
        """A collective with those that take a batch, or leave as well."""
        if not self._over:
            with self.rounds.connection.on(self.rounds.channel) as channel:
                self._end(channel)

    @override
    def fail(self, error: BaseException) -> None:
        if not self._over:
            self.rounds.connection.fail(self.rounds.channel, error)

    @override
    def close(self) -> None:
        getattr(self._batches, "close", lambda: None)()

    def _take(self) -> Any:
        if self._batches is None:
            self._batches = iter(self.data)
        if self._ended or not self.rounds.turn(self._number):
            return None
        batch = as_batch(next(self._batches, None))
        self._position = position_of(self.data)
        if batch is None:
            self._ended = True
        elif self._columns is None:
            self._columns = describe(batch)
        return batch

    def _agree(
        self, channel: CollectiveChannel, samples: int, has: bool, asks: bool, ends: bool
    ) -> _Agreement:
        saves = channel.rank == 0 and not ends and self.rounds.save()
        mine = torch.tensor([samples, has, not self._ended, asks, ends, saves], dtype=torch.int64)
        return _Agreement(*channel.sum(mine).tolist())

    def _end(self, channel: CollectiveChannel, error: str | None = None) -> None:
        self._agree(channel, 0, False, False, True)
        self._share_reason(channel, error=error)

    def _share_reason(
        self, channel: CollectiveChannel, reason: str | None = None, error: str | None = None
    ) -> None:
        """Exchange why the rounds end: a rank's error becomes an error on all others."""
        self._over = self.cut = True
        gathered = channel.gather_json({"reason": reason, "error": error})
        for rank, message in enumerate(gathered):
            if message["error"] and rank != channel.rank and not error:
                raise RankError(f"Rank {rank} could not take its next batch: {message['error']}")
        self.reason = next((message["reason"] for message in gathered if message["reason"]), None)


_WAKE = 0.1  # seconds between checks for a stop while waiting for a batch
_END = 5.0  # seconds to wait for a batch that is not needed any more


def prefetch_of(prefetch: int, connection: Connection) -> int:
    """How many batches to prefetch: at least as many as lookups may be made in advance, unless 0."""
    if prefetch < 0:
        raise ValueError(f"prefetch must not be negative, got {prefetch}.")
    return max(prefetch, connection.ahead) if prefetch else 0


def feed(
    data: Iterable[Any],
    place: Callable[[Any], Any] = same,
    *,
    prefetch: int = 2,
    skip: int = 0,
    stopped: Callable[[], object] = never,
    rounds: RankRounds | None = None,
    within: Within = nullcontext,
) -> Feed:
    """The batches of `data` after the first `skip`, until its end or until `stopped` gives a reason.

    Closing the feed ends its thread. Data that has a position is then moved back to the last batch that was
    handed out, as if nothing had been prefetched. With `rounds`, all ranks must close it after the same
    batch. Each batch is taken and placed in a context that `within` makes.
    """
    if rounds is not None and rounds.connection.world_size > 1:
        wait = rounds.connection.settings.timeout
        source: BatchSource = RankBatchSource(data, place, rounds, within)
    else:
        wait, source = _END, BatchSource(_take(data, place, skip), within)
    return PrefetchFeed(data, source, stopped, prefetch, wait) if prefetch else Feed(data, source, stopped)


class Feed(Iterator[FedBatch]):
    """Takes batches when they are requested."""

    def __init__(self, data: Any, source: BatchSource, stopped: Callable[[], object]) -> None:
        self._data = data
        self._source = source
        self._stopped = stopped
        self._last = position_of(data)
        self._closed = False
        self._abandoned = False
        self.reason: str | None = None  # why all ranks stop, known when the last batch was handed out

    def __next__(self) -> FedBatch:
        stopped = self._stopped()
        fed = None if self._closed else self._source.next(str(stopped) if stopped else None)
        if fed is None:
            self.reason = self._source.reason
            raise StopIteration
        self._last = fed.position
        activity.advance()
        return fed

    def close(self) -> None:
        """No more batches are needed."""
        if not self._closed:
            self._closed = True
            try:
                self._source.leave()
            finally:
                self._source.close()
            if self._source.cut:
                move_back(self._data, self._last)

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and kind is not GeneratorExit:
            self.abandon(error)
        self.close()

    def abandon(self, error: BaseException) -> None:
        """This rank has failed: close without waiting for others, which may wait for this one."""
        if not self._source.alone and not self._abandoned:
            self._abandoned = True
            self._abandon(error)

    def _abandon(self, error: BaseException) -> None:
        self._closed = True
        self._source.fail(error)
        self._source.close()


class PrefetchFeed(Feed):
    """Takes batches in advance, on a thread."""

    def __init__(
        self, data: Any, source: BatchSource, stopped: Callable[[], object], prefetch: int, wait: float | None
    ) -> None:
        super().__init__(data, source, stopped)
        self._size = prefetch
        self._wait = wait
        self._taken = 0
        self._handed_out = 0
        self._changed = threading.Condition()
        self._waiting: deque[FedBatch | BaseException] = deque()
        self._complete = False  # nothing more will come
        self._stop: tuple[int, str] | None = None  # the first batch that may say so, and why to stop
        (self._thread,) = start([self._fill])

    def __next__(self) -> FedBatch:
        with self._changed:
            while not (self._waiting or self._complete or self._closed or self._stops()):
                self._changed.wait(_WAKE)  # a signal handler cannot notify, so this loop polls
            if not self._waiting or self._closed or self._stops():
                self.reason = self._source.reason
                raise StopIteration
            return self._hand_out()

    def _hand_out(self) -> FedBatch:
        """The first batch that waits, or its error; the lock is held."""
        item = self._waiting.popleft()
        self._changed.notify_all()
        if isinstance(item, BaseException):
            raise item
        self._handed_out += 1
        self._last = item.position
        activity.advance()
        return item

    @override
    def close(self) -> None:
        """The thread ends after the batch that it is taking."""
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._wait)
        if self._thread.is_alive():
            _log.warning("The data has not released its thread; its position is ahead of training.")
        elif self._taken > self._handed_out or self._source.cut:
            move_back(self._data, self._last)

    def _abandon(self, error: BaseException) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._source.fail(error)
        self._thread.join(_END)  # no thread may be in a collective when the interpreter ends

    def _stops(self) -> bool:
        """Whether to stop here; several ranks stop at a batch that none has started to take."""
        stopped = self._stopped()
        if stopped and self._stop is None:
            self._stop = (self._handed_out + self._size, str(stopped))
        return bool(stopped) and self._source.alone

    def _fill(self) -> None:
        """The thread: takes a batch whenever there is room."""
        try:
            while self._room():
                stops = self._stop is not None and not self._source.alone and self._taken >= self._stop[0]
                fed = self._source.next(self._stop[1] if stops and self._stop is not None else None)
                if fed is None:
                    break
                with self._changed:
                    self._taken += 1
                    self._waiting.append(fed)
                    self._changed.notify_all()
            if not self._abandoned:
                self._source.leave()
        except BaseException as error:
            with self._changed:
                self._waiting.append(error)
        finally:
            self._source.close()
            with self._changed:
                self._complete = True
                self._changed.notify_all()

    def _room(self) -> bool:
        with self._changed:
            while len(self._waiting) >= self._size and not self._closed:
                self._changed.wait()
            return not self._closed


_LOOK = 0.02  # seconds between two looks at whether there is no task for now


class LeasedFeed(PrefetchFeed):
    """The batches that this trainer leases in one epoch, read in the background, until `close`.

    Unlike the feed of ranks with fixed shares it agrees with nobody: who has a batch takes part in the next
    step with it, who has none takes part without. A trainer waits for a batch that is being read, but not for
    records that others may still be working on.
    """

    def __init__(self, loader: LeasedBatches, place: Callable[[Any], Any], prefetch: int) -> None:
        self._loader = loader
        self._placing = False  # whether a batch is on its way
        super().__init__(None, BatchSource(self._lease(place)), never, max(1, prefetch), wait=None)

    def _lease(self, place: Callable[[Any], Any]) -> Generator[FedBatch, None, None]:
        batches = iter(self._loader)
        while True:
            self._placing = False
            with blaming(self._loader.suspects):
                batch = next(batches, None)
            if batch is None:
                return
            self._placing = True
            records = self._loader.hand_over()
            with blaming(records):
                placed, samples = place(batch), samples_of(batch)
            yield FedBatch(placed, None, samples, samples, records=records)

    @property
    def ended(self) -> bool:
        """Whether all records of the epoch are done, by whomever."""
        return self._complete and not self._waiting

    def take(self, stopped: Callable[[], object]) -> FedBatch | None:
        """The next batch; None if there is none for now, if the epoch is over, or if `stopped` says so."""
        with self._changed:
            while not self._waiting:
                idle = self._loader.idle and not self._placing
                if self._complete or self._closed or stopped() or idle:
                    return None
                self._changed.wait(_LOOK)
            return self._hand_out()

    @override
    def close(self) -> None:
        """End the thread; the leases of batches that were not taken stay with the client."""
        self._loader.stop()
        super().close()
        self._waiting.clear()
