"""`EpochService`: a loader that hands out the batches of epochs, which a program reads, to trainers.

Loader i of L numbers its batches 0, 1, 2, … in every epoch; number j of them, its *index*, is batch number
j · L + i of the epoch, and belongs to trainer number modulo W.

    trainer                                          loader
    hello: from which epoch and index on it          waits until all W trainers have come, begins to read at
      needs batches, which earlier ones it is          the oldest index, drops what its trainer has already
      not done with, and the positions it knows
    stay, always one                                 is answered now and then, so that a trainer notices that
                                                       its loader was replaced, even without another call
    next(epoch), several at a time                   sends the next batch of the trainer's queue: index,
                                                       position after it, arrays; or "end" with the number
                                                       of its batches; or "wait" after a second
    next(epoch + 1)                                  reads the next epoch once one trainer has asked for it
    resend(reference, worker), done(references)      see `service.py`; "wait" after a second, if the
                                                       batch has still to be read again
    identity                                         the identity of its data, once its program has set it;
                                                       "wait" after a second
    statistics(whole)                                see `service.py`
    leave                                            this trainer needs no more

A queue holds a bounded number of batches, and reading waits while that of the next batch is full.

**A loader dies.** Another takes its index; trainers find it and say hello, with what they need by then.
Reading resumes at a position of the source; without positions the epoch is read from its start, and the
batches that were sent are dropped, so such a source has to give the same batches every time. If the job has
embedding workers, reading resumes earlier, at the oldest batch that a trainer is not done with: the ids of
such batches are held again, for a worker that is replaced at the same time, or later.

**A trainer restarts**, in a new session. It may need batches that were handed out before: reading then
goes back. A newer generation of trainers starts with empty queues; older ones are refused.

**Reading fails.** Batches read before are still handed out, then every trainer gets the error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from karvan.activity import TRAINERS, activity
from karvan.cluster.batch_messages import pack
from karvan.cluster.loader.service import (
    BatchName,
    IdReceiver,
    LoaderService,
    LoaderStatistics,
    SentIds,
    SplitIds,
    split_by_name,
)
from karvan.cluster.role_process import Generations
from karvan.devices import require_cpu_batches
from karvan.protocol import loader as protocol
from karvan.ragged import Batch
from karvan.wire import Caller, Endpoint, Message, RefusedError, Request, endpoints
from karvan.wire.schema import Head, Struct

# A loader's queue for one trainer: its position, and the batches that wait for it.


EpochIndex = tuple[int, int]  # epoch and index


@dataclass(frozen=True)
class Start:
    """A batch at which reading can start, and the source's position before it, if that is known."""

    epoch: int
    index: int
    position: Any

    @property
    def batch(self) -> EpochIndex:
        """The batch, for comparisons."""
        return self.epoch, self.index


class TrainerQueue:
    """What waits for one trainer of a run, from what its hello asks for.

    filled: all batches before it are in the queue, or not needed. taken: later batches that trainers of an
    earlier run have had. asked: the newest epoch that it has asked for. error_sent: whether it has received
    the error. watches: whether it has called `stay`. unread: batches that it has, but is not done with, and
    whose ids this loader has still to read, because it replaces the one that sent them.
    """

    def __init__(self, hello: protocol.LoaderHello) -> None:
        epoch = hello.epoch
        self.run = hello.run
        self.ids = hello.ids
        self.filled: EpochIndex = (epoch, hello.next)
        self.taken = frozenset((epoch, index) for index in hello.taken)
        self.positions = [Start(epoch, index, position) for index, position in hello.positions]
        self.asked = -1
        self.items: deque[Message[protocol.EpochBatch | protocol.EndOfEpoch]] = deque()
        self.error_sent = self.watches = self.left = False
        self.unread = set(hello.unfinished)
        if hello.end is not None:
            self.end(epoch, *hello.end)
            self.positions.append(Start(*self.filled, hello.end[1]))
        if hello.before_unfinished is not None:
            self.positions.append(Start(*hello.before_unfinished))

    @property
    def oldest(self) -> EpochIndex:
        """The first batch that has to be read for this trainer."""
        return min(self.filled, *self.unread) if self.unread else self.filled

    def wants(self, begin: EpochIndex) -> bool:
        """Whether the trainer has not had this batch yet."""
        return begin >= self.filled and begin not in self.taken

    def first(self, epoch: int) -> Message[protocol.EpochBatch | protocol.EndOfEpoch] | None:
        """The next batch of an epoch, or its end; drops those of earlier epochs."""
        while self.items and self.items[0].head.epoch < epoch:
            self.items.popleft()
        return self.items[0] if self.items and self.items[0].head.epoch == epoch else None

    def end(self, epoch: int, total: int, position: Any) -> None:
        """The epoch has `total` batches, and the source is at `position` after them."""
        self.items.append(Message(protocol.EndOfEpoch(epoch=epoch, end=total, position=position)))
        self.filled = (epoch + 1, 0)


_POSITIONS = 64  # of the last batches, from which reading can restart


class EpochService(LoaderService[protocol.DataIdentity]):
    """Loader number `index` of `count`: trainers call its endpoints, one reading thread calls the rest."""

    hello = Struct(protocol.LoaderHello)

    stay: ClassVar[float] = 30.0
    """Seconds until `stay` is answered."""

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        *,
        queue: int = 8,
        generations: Generations | None = None,
        workers: Sequence[IdReceiver] = (),
        split: SplitIds = split_by_name,
    ) -> None:
        super().__init__(index)
        self._count = count
        # With shorter queues, synchronous trainers that take what is ready first could wait for each other.
        self._bound = max(queue, count + 2)
        self._generations = generations or Generations()
        self._generation = self._generations.newest
        self._world = 0
        self._trainers: dict[int, TrainerQueue] = {}
        self._gone: set[str] = set()  # runs that were replaced by newer ones
        self._sent = SentIds(workers, split)
        self._cursor: EpochIndex | None = None  # of the next batch that is read
        self._positions: deque[Start] = deque(maxlen=_POSITIONS)
        self._over = False  # the program has no more epochs
        self.endpoints = endpoints(
            protocol.LOADER_CALLS,
            Endpoint(protocol.NEXT, self._next),
            Endpoint(protocol.STAY, self._stay),
            Endpoint(protocol.DONE, self._done),
            Endpoint(protocol.RESEND, self._resend),
            Endpoint(protocol.IDENTITY, self._answer_description),
            Endpoint(protocol.STATISTICS, self._answer_statistics),
            Endpoint(protocol.LEAVE, self._leave),
        )

    # Called by trainers

    @override
    def welcome(self, caller: Caller) -> dict[str, Any]:
        hello: protocol.LoaderHello = caller.hello
        trainer, world = hello.trainer, hello.trainers
        requested = hello.loader, hello.loaders
        queue = TrainerQueue(hello) if hello.kind != "control" else None
        if queue is not None and queue.unread and max(queue.unread) >= queue.filled:
            raise RefusedError(
                f"expected unfinished batches before the next one, {queue.filled}, got {max(queue.unread)}."
            )
        if requested != (self._index, self._count):
            mine, asked = (f"{index} of {count}" for index, count in ((self._index, self._count), requested))
            raise RefusedError(f"expected to be asked for as loader {mine}, got {asked}.")
        if trainer >= world:
            raise RefusedError(f"expected a trainer from 0 to {world - 1}, got {trainer}.")
        generation = self._generations.check(hello.generation)
        with self._changed:
            if generation < self._generation or hello.run in self._gone:
                raise RefusedError("expected the newest trainers, got one that was replaced by a newer one.")
            if queue is not None:
                self._admit(trainer, queue, (generation, world))
        return {"loader": self._index, "generation": generation}

    def _admit(self, trainer: int, queue: TrainerQueue, job: tuple[int, int]) -> None:
        if job != (self._generation, self._world):
            if self._world:  # otherwise no trainer has received the error yet
                self._error = ""
            self._gone |= {trainer_.run for trainer_ in self._trainers.values()}
            self._generation, self._world = job
            self._trainers = {}
            self._cursor = None  # the reading thread starts again
            self._sent.forget()
        connected = self._trainers.get(trainer)
        if connected is not None and connected.run != queue.run:
            self._gone.add(connected.run)
            self._sent.forget(trainer)
        if connected is None or connected.run != queue.run:
            self._trainers[trainer] = queue
        self._changed.notify_all()

    def _stay(self, call: Request[Head]) -> None:
        with self._changed:
            trainer = self._of(call.caller)
            # The first one is answered at once: if loaders are killed one after the other, a call that waits
            # for one that survives long enough would miss its deadline.
            if trainer.watches:
                self._changed.wait_for(lambda: self.closed or not self._expects(trainer), self.stay)
            trainer.watches = True

    def _done(self, call: Request[protocol.References]) -> None:
        number, references = call.caller.hello.trainer, call.head.references
        with self._changed:
            trainer = self._trainers.get(number)
            if trainer is not None:
                trainer.unread -= {(epoch, index // self._count) for _, epoch, index in references}
        self._sent.done(number, references)

    def _resend(
        self, call: Request[protocol.IdsOfBatch]
    ) -> Message[protocol.NoAnswerYet | protocol.StatisticsDigest]:
        reference = BatchName(*call.head.reference)
        with self._changed:
            self._changed.wait_for(
                lambda: self.closed or self._error or self._has_read(call.caller, reference), self.wait
            )
            if not self._has_read(call.caller, reference):
                if self._error:
                    raise self._failure()
                return Message(protocol.NoAnswerYet(wait=True))
        self._sent.resend(reference, call.head.worker)
        digest = self._statistics.digest
        return Message(protocol.StatisticsDigest(**({"statistics": digest} if digest else {})))

    def _has_read(self, caller: Caller, reference: BatchName) -> bool:
        """Whether a batch of this trainer has been read; False before it has said what it needs."""
        if caller.hello.run in self._gone:
            raise RefusedError("expected a call of the newest trainers, got one of an earlier run.")
        trainer = self._trainers.get(caller.hello.trainer)
        if trainer is None or trainer.run != caller.hello.run:
            return False
        begin = reference.epoch, reference.number // self._count
        return begin < trainer.filled and begin not in trainer.unread

    def _leave(self, call: Request[Head]) -> None:
        with self._changed:
            trainer = self._of(call.caller)
            trainer.left = True
            trainer.unread.clear()
            self._changed.notify_all()

    def _next(self, call: Request[protocol.EpochNumber]) -> Message[Any]:
        epoch, caller = call.head.epoch, call.caller
        with self._changed:
            trainer = self._of(caller)
            trainer.asked = max(trainer.asked, epoch)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._can_answer(trainer, epoch), self.wait)
            self._of(caller)
            item = trainer.first(epoch)
            if item is None:
                return self._nothing(trainer, epoch)
            if isinstance(item.head, protocol.EpochBatch):  # an end stays, for other calls that are in flight
                trainer.items.popleft()
                self._changed.notify_all()
            return item

    def _of(self, caller: Caller) -> TrainerQueue:
        trainer = self._trainers.get(caller.hello.trainer)
        if trainer is None or trainer.run != caller.hello.run:
            raise RefusedError("expected a call of the newest trainers, got one of an earlier run.")
        return trainer

    def _can_answer(self, trainer: TrainerQueue, epoch: int) -> bool:
        """Whether a call need not wait any longer."""
        if self.closed or self._error or not self._expects(trainer):
            return True
        return trainer.first(epoch) is not None or self._beyond(epoch)

    def _expects(self, trainer: TrainerQueue) -> bool:
        """Whether it has neither left nor been replaced."""
        return not trainer.left and trainer in self._trainers.values()

    def _nothing(self, trainer: TrainerQueue, epoch: int) -> Message[protocol.MissingTrainers]:
        if self._error:
            trainer.error_sent = True
            self._changed.notify_all()
            raise self._failure()
        if self._beyond(epoch):
            raise RuntimeError(
                f"expected a request for epochs up to {self._last_epoch}, because its program sends no "
                f"more, got {epoch}. To send several, write `for epoch in data.epochs()`."
            )
        missing = sorted(set(range(self._world)) - set(self._trainers))
        return Message(protocol.MissingTrainers(wait=missing))

    @property
    def _last_epoch(self) -> int:
        return -1 if self._cursor is None else self._cursor[0] - 1

    def _beyond(self, epoch: int) -> bool:
        return self._over and self._cursor is not None and epoch > self._last_epoch

    # Called by the reading thread

    def identify(self, identity: dict[str, Any] | None, statistics: LoaderStatistics | None = None) -> None:
        """Set the identity of the data, None if it has none, and the transforms' statistics."""
        self._describe_data(protocol.DataIdentity(identity=identity), statistics)

    def begin(self) -> Start | None:
        """Where to start reading, once all trainers have connected and one needs more; None after `close`."""
        with self._changed:
            target = self._wait_for_target()
            if self.closed or target is None:
                return None
            epoch = target[0]
            received = [start for trainer in self._trainers.values() for start in trainer.positions]
            starts = [
                start
                for start in (*received, *self._positions)
                if (epoch, 0) <= start.batch <= target and start.position is not None
            ]
            latest = max(starts, key=lambda start: start.batch, default=Start(epoch, 0, None))
            self._cursor = latest.batch
            return latest

    def begin_once(self) -> None:
        """As `begin`, for a program that can send epoch 0 only, from its start, and only once."""
        with self._changed:
            self._wait_for_target()
            self._cursor = (0, 0)

    def _wait_for_target(self) -> EpochIndex | None:
        if self._description is None:
            self.identify(None)
        activity.wait_for(self._changed, TRAINERS, lambda: self.closed or self._target() is not None)
        return self._target()

    def send(self, batch: Batch, position: Any = None, meta: Any = None) -> bool:
        """Queue the next batch, with the source's position after it; waits for room.

        False: it is not needed, because reading has to start again.
        """
        with self._changed:
            if self._stopped():
                return False
            assert self._cursor is not None
            epoch, index = cursor = self._cursor
            number = index * self._count + self._index
            owner = number % self._world
            needed = self._trainers[owner].wants(cursor)
            unread = cursor in self._trainers[owner].unread
            if needed:
                activity.wait_for(
                    self._changed,
                    TRAINERS,
                    lambda: self._stopped() or len(self._trainers[owner].items) < self._bound,
                )
                if self._stopped():
                    return False
            generation, names = self._generation, self._trainers[owner].ids
        item: Message[protocol.EpochBatch | protocol.EndOfEpoch] | None = None
        reference = BatchName(generation, epoch, number)
        if unread:
            self._sent.hold(reference, owner, batch, names)
        elif needed:  # outside of the lock: a worker may be slow
            rest, worker = self._sent.put(reference, owner, batch, names)
            packed = pack(rest)
            head = {"epoch": epoch, "index": index, "position": position, "meta": meta, "rows": batch.samples}
            if self._statistics.digest:
                head["statistics"] = self._statistics.digest
            if worker is not None:
                head |= {"reference": reference, "worker": worker}
            item = Message(protocol.EpochBatch(**packed.head, **head), packed.arrays)
        with self._changed:
            if self._stopped() or generation != self._generation:
                return False
            if item is not None:
                self._trainers[owner].items.append(item)
            if unread:
                if cursor not in self._trainers[owner].unread:  # the trainer is done with it since
                    self._sent.done(owner, [reference])
                self._trainers[owner].unread.discard(cursor)
            for trainer_ in self._trainers.values():
                trainer_.filled = max(trainer_.filled, (epoch, index + 1))
            self._cursor = (epoch, index + 1)
            self._positions.append(Start(*self._cursor, position))
            self._changed.notify_all()
        activity.advance()
        return True

    def end(self, position: Any = None) -> bool:
        """The epoch has no more batches; `position` is where the next one begins. False: see `send`."""
        with self._changed:
            if self._stopped():
                return False
            assert self._cursor is not None
            epoch, total = self._cursor
            for trainer_ in self._trainers.values():
                had = max((index + 1 for begun, index in trainer_.unread if begun == epoch), default=0)
                if trainer_.filled[0] == epoch:
                    had = max(had, trainer_.filled[1])
                if had > total:
                    raise RuntimeError(
                        f"Epoch {epoch} expected {had} batches, as before, got {total}: "
                        "a source without positions must give the same batches every time."
                    )
                if trainer_.filled[0] == epoch:
                    trainer_.end(epoch, total, position)
            self._cursor = (epoch + 1, 0)
            self._positions.append(Start(*self._cursor, position))
            self._changed.notify_all()
        return True

    def finish(self) -> None:
        """There will be no more epochs."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_until_reported(self, seconds: float) -> None:
        """Wait until all trainers have received the error."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.closed or self._all(lambda trainer: trainer.error_sent or trainer.left), seconds
            )

    def wait_until_left(self) -> bool:
        """Wait until all trainers have left; False if they need something again."""
        with self._changed:
            activity.wait_for(
                self._changed,
                TRAINERS,
                lambda: (
                    self.closed or self._all(lambda trainer: trainer.left) or (self._world and self._behind())
                ),
            )
            return self.closed or not self._behind()

    def _all(self, true_of: Callable[[TrainerQueue], bool]) -> bool:
        return 0 < self._world == len(self._trainers) and all(map(true_of, self._trainers.values()))

    def _target(self) -> EpochIndex | None:
        """The oldest batch that trainers need, if one of them has asked for its epoch or has it."""
        if self._error or not self._all(lambda trainer: True):
            return None
        target = min(trainer.oldest for trainer in self._trainers.values())
        asked = max(trainer.asked for trainer in self._trainers.values()) >= target[0]
        return target if asked or any(trainer.unread for trainer in self._trainers.values()) else None

    def _behind(self) -> bool:
        if len(self._trainers) < self._world or self._cursor is None:
            return True
        return min(trainer.oldest for trainer in self._trainers.values()) < self._cursor

    def _stopped(self) -> bool:
        return self.closed or self._behind()


# The batches of an epoch that a loader reads, starting at a position.


Batches = Iterable[Any] | Callable[[int], Iterable[Any]]


def serve(service: EpochService, batches: Batches, statistics: LoaderStatistics | None = None) -> None:
    """Send batches for as long as trainers ask for epochs; until the service is closed.

    statistics: of the transforms that make the batches.
    """
    require_cpu_batches(batches)
    source = _Epochs(batches)
    describe = getattr(batches, "identity", lambda: None)()
    service.identify(None if describe is None else describe.state(), statistics)
    while (start := service.begin()) is not None:
        batches_of_epoch = source.batches(start)
        try:
            for batch in batches_of_epoch:
                if not service.send(as_batch(batch), source.position()):
                    break
            else:
                # Sources that are made for each epoch have positions of their own.
                if service.end(None if callable(batches) else source.position()):
                    source.following = start.epoch + 1
        finally:
            getattr(batches_of_epoch, "close", lambda: None)()


def as_batch(batch: Any) -> Batch:
    """The same batch, after a check that all features have the same number of samples."""
    return batch if isinstance(batch, Batch) else Batch(batch)


class _Epochs:
    """What is sent: something that gives an epoch whenever it is iterated, or a function that makes one.

    following: the epoch that the next iteration gives; None: one is in progress.
    """

    def __init__(self, batches: Batches) -> None:
        self._make = batches if callable(batches) else None
        self._source: Any = None if callable(batches) else batches
        self._begin = self.position()
        self.following: int | None = 0

    def position(self) -> Any:
        """The position after the last batch; None if the source has none."""
        return getattr(self._source, "state_dict", lambda: None)()

    def batches(self, start: Start) -> Iterator[Any]:
        """Batches from `start`; without a position all of the epoch."""
        if self._make is not None:
            self._source = self._make(start.epoch)
            if start.position is not None:
                self._source.load_state_dict(start.position)
            yield from self._source
            return
        moved = False
        if (start.epoch, start.index) != (self.following, 0):
            position = self._begin if start == Start(0, 0, None) else start.position
            if position is not None:
                self._source.load_state_dict(position)  # the position came from it
                moved = start.index == 0
            elif hasattr(self._source, "start_epoch"):
                self._source.start_epoch(start.epoch)
            elif self._begin is not None:
                raise RuntimeError(f"Epoch {start.epoch} expects a position to begin at, got none.")
        self.following = None
        empty = True
        for batch in self._source:
            empty = False
            yield batch
        if empty and moved and start.epoch:
            yield from self._source  # it was moved to the end of the previous epoch, which had nothing left
