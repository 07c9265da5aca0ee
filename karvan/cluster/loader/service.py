"""The loader: hands out the batches that a program reads, to trainers that ask for them.

Loader i of L numbers its batches 0, 1, 2, … in every epoch; number j of them, its *index*, is batch number
j · L + i of the epoch, and belongs to trainer number modulo W.

    trainer                                          loader
    hello: from which epoch and index on it          waits until all W trainers have come, begins to read at
      needs batches, and the positions it knows        the oldest place, drops what its trainer has already
    stay, always one                                 is answered now and then: a trainer notices by it that
                                                       its loader was replaced, also without another call
    next(epoch), several at a time                   gives the next batch of the trainer's queue: index,
                                                       position behind it, arrays; or "end" with the number
                                                       of its batches; or "wait" after a second
    next(epoch + 1)                                  reads the next epoch once one trainer has asked for it
    resend(reference, worker), done(references)      see `id_forwarding.py`
    identity                                         what tells its data from other data, once its program
                                                       has said so; "wait" after a second
    statistics(whole)                                see `statistics.py`
    leave                                            this trainer wants no more

A queue holds a bounded number of batches, and reading waits while that of the next batch is full.

**A loader dies.** Another takes its index; trainers find it and say hello, with what they need by then.
Positions of the source tell where to begin; without them the epoch is read from its start, and as many
batches are dropped, so such a source has to give the same batches every time.

**A trainer comes anew**, in a new session. It may need batches that were handed out before: reading then
goes back. A newer generation of trainers (`generations.py`) begins with empty queues; older ones are refused.

**Reading fails.** Batches read before are still handed out, then every trainer gets the error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from karvan.activity import TRAINERS, activity
from karvan.cluster.batch_messages import pack
from karvan.cluster.generations import Generations
from karvan.cluster.loader.id_forwarding import BatchName, IdReceiver, SentIds, SplitIds, split_by_name
from karvan.cluster.loader.statistics import LoaderStatistics
from karvan.cluster.loader.trainer_queue import Item, Known, Place, TrainerQueue
from karvan.exit_codes import DAMAGED, FAILED, TEMPORARY, code_of
from karvan.outages import mark
from karvan.protocol.loader import LOADER_CALLS, LOADER_HELLO
from karvan.ragged import Batch
from karvan.wire import Caller, Message, RefusedError, Request, Service, endpoints

_STAY = 30.0  # seconds
_WAIT = 1.0  # seconds until a call is answered, even if there is nothing yet
_POSITIONS = 64  # of the last batches, from which reading can begin again


@dataclass(frozen=True)
class Start:
    """Where to read on: a position of the source if one is known, otherwise index 0."""

    epoch: int
    index: int
    position: Any


class LoaderService(Service):
    """Loader number `index` of `count`: trainers call `answer`, one thread that reads calls the rest."""

    hello = LOADER_HELLO

    progresses = False  # batches are, see `send`

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
        if queue < 2:
            raise ValueError(f"queue must be at least 2 batches for each trainer, got {queue}.")
        self.name = f"loader {index}"
        self._index = index
        self._count = count
        # Trainers in step that take what is ready first could wait for each other if queues were shorter.
        self._bound = max(queue, count + 2)
        self._changed = threading.Condition()
        self._generations = generations or Generations()
        self._generation = self._generations.newest
        self._world = 0
        self._trainers: dict[int, TrainerQueue] = {}
        self._gone: set[str] = set()  # runs that others have replaced
        self._sent = SentIds(workers, split)
        self._cursor: Place | None = None  # of the next batch that is read
        self._positions: deque[Known] = deque(maxlen=_POSITIONS)
        self._error = ""
        self._error_code = FAILED
        self._identity: tuple[dict[str, Any] | None] | None = None  # of the data, once the program has begun
        self._statistics = LoaderStatistics()  # of the transforms; final as soon as there is an identity
        self._over = False  # the program has no more epochs
        self._closed = False
        self.endpoints = endpoints(
            LOADER_CALLS,
            {
                "next": self._next,
                "stay": self._stay,
                "done": self._done,
                "resend": self._resend,
                "identity": self._tell_identity,
                "statistics": self._tell_statistics,
                "leave": self._leave,
            },
        )

    # What trainers call

    def welcome(self, caller: Caller) -> dict[str, Any]:
        """See `Service.welcome`."""
        hello = caller.hello
        given, trainer, world, run = (hello[name] for name in ("generation", "trainer", "trainers", "run"))
        place = hello["loader"], hello["loaders"]
        came = TrainerQueue.of(hello) if hello["kind"] != "control" else None
        if place != (self._index, self._count):
            mine, asked = (f"{index} of {count}" for index, count in ((self._index, self._count), place))
            raise RefusedError(f"expected to be asked for as loader {mine}, got {asked}.")
        if trainer >= world:
            raise RefusedError(f"expected a trainer from 0 to {world - 1}, got {trainer}.")
        generation = self._generations.check(given)
        with self._changed:
            if generation < self._generation or run in self._gone:
                raise RefusedError("expected the newest trainers, got one that others have replaced.")
            if came is not None:
                self._let_in(trainer, came, (generation, world))
        return {"loader": self._index, "generation": generation}

    def _let_in(self, trainer: int, came: TrainerQueue, job: tuple[int, int]) -> None:
        if job != (self._generation, self._world):
            if self._world:  # otherwise nobody has heard of the error yet
                self._error = ""
            self._gone |= {each.run for each in self._trainers.values()}
            self._generation, self._world = job
            self._trainers = {}
            self._cursor = None  # whoever reads begins anew
            self._sent.forget()
        known = self._trainers.get(trainer)
        if known is not None and known.run != came.run:
            self._gone.add(known.run)
            self._sent.forget(trainer)
        if known is None or known.run != came.run:
            self._trainers[trainer] = came
        self._changed.notify_all()

    def _stay(self, call: Request) -> Message:
        with self._changed:
            trainer = self._of(call.caller)
            # The first one is answered at once: where loaders are killed one after the other, a call that
            # waits for one that lives long enough would miss its deadline.
            if trainer.watches:
                self._changed.wait_for(lambda: self._closed or not self._expects(trainer), _STAY)
            trainer.watches = True
        return Message({})

    def _done(self, call: Request) -> Message:
        self._sent.done(call.caller.hello["trainer"], call.head["references"])
        return Message({})

    def _resend(self, call: Request) -> Message:
        self._sent.resend(BatchName(*call.head["reference"]), call.head["worker"])
        return Message({})

    def _tell_identity(self, call: Request) -> Message:
        known = self._wait_for_program()
        return Message({"wait": True} if known is None else {"identity": known[0]})

    def _tell_statistics(self, call: Request) -> Message:
        begun = self._wait_for_program() is not None
        return self._statistics.message(call.head["whole"]) if begun else Message({"wait": True})

    def _leave(self, call: Request) -> Message:
        with self._changed:
            self._of(call.caller).left = True
            self._changed.notify_all()
        return Message({})

    def _wait_for_program(self) -> tuple[dict[str, Any] | None] | None:
        """The identity of the data in a tuple, as soon as the program begins; None if that takes longer."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._error or self._identity is not None, _WAIT)
            if self._identity is None and self._error:
                raise self._failure()
            return self._identity

    def _next(self, call: Request) -> Message:
        epoch, caller = call.head["epoch"], call.caller
        with self._changed:
            trainer = self._of(caller)
            trainer.asked = max(trainer.asked, epoch)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._reason(trainer, epoch), _WAIT)
            self._of(caller)
            item = trainer.first(epoch)
            if item is None:
                return self._nothing(trainer, epoch)
            if not item.ends:  # an end stays, for calls that were under way with the first one to get it
                trainer.items.popleft()
                self._changed.notify_all()
            return item.message

    def _of(self, caller: Caller) -> TrainerQueue:
        trainer = self._trainers.get(caller.hello["trainer"])
        if trainer is None or trainer.run != caller.hello["run"]:
            raise RefusedError("expected a call of the newest trainers, got one of those before.")
        return trainer

    def _reason(self, trainer: TrainerQueue, epoch: int) -> bool:
        """Whether a call need not wait any longer."""
        if self._closed or self._error or not self._expects(trainer):
            return True
        return trainer.first(epoch) is not None or self._beyond(epoch)

    def _expects(self, trainer: TrainerQueue) -> bool:
        """Whether it has neither left nor been replaced."""
        return not trainer.left and trainer in self._trainers.values()

    def _failure(self) -> RuntimeError:
        """What trainers get: an outage of the data, damage, or the fault of the program that reads it."""
        error = RuntimeError(self._error)
        if self._error_code in (DAMAGED, TEMPORARY):
            mark(error, self._error_code == TEMPORARY)
        return error

    def _nothing(self, trainer: TrainerQueue, epoch: int) -> Message:
        if self._error:
            trainer.told = True
            self._changed.notify_all()
            raise self._failure()
        if self._beyond(epoch):
            raise RuntimeError(
                f"expected epochs up to {self._last_epoch} to be asked for, which is all that its program "
                f"sends, got {epoch}; a program for several has `for epoch in data.epochs()`."
            )
        missing = sorted(set(range(self._world)) - set(self._trainers))
        return Message({"wait": missing})

    @property
    def _last_epoch(self) -> int:
        return -1 if self._cursor is None else self._cursor[0] - 1

    def _beyond(self, epoch: int) -> bool:
        return self._over and self._cursor is not None and epoch > self._last_epoch

    # What the thread that reads calls

    @property
    def closed(self) -> bool:
        """Whether nobody serves it any more."""
        return self._closed

    @property
    def statistics(self) -> LoaderStatistics | None:
        """What trainers were told of the transforms; None before the program begins."""
        return None if self._identity is None else self._statistics

    def identify(self, identity: dict[str, Any] | None, statistics: LoaderStatistics | None = None) -> None:
        """Say what tells the data from other data, None if nothing does, and the transforms' statistics."""
        with self._changed:
            self._identity = (identity,)
            self._statistics = statistics or LoaderStatistics()
            self._changed.notify_all()

    def begin(self) -> Start | None:
        """Where to begin to read, once all trainers have come and one wants more; None after `close`."""
        if self._identity is None:
            self.identify(None)
        with self._changed:
            activity.wait_for(self._changed, TRAINERS, lambda: self._closed or self._wanted() is not None)
            target = self._wanted()
            if self._closed or target is None:
                return None
            epoch = target[0]
            told = [known for one in self._trainers.values() for known in one.positions]
            begins = [
                known
                for known in (*told, *self._positions)
                if (epoch, 0) <= known.place <= target and known.position is not None
            ]
            found = max(begins, key=lambda known: known.place, default=Known((epoch, 0), None))
            self._cursor = found.place
            return Start(*found.place, found.position)

    def begin_once(self) -> None:
        """As `begin`, for a program that can send epoch 0 only, from its start, and only once."""
        if self._identity is None:
            self.identify(None)
        with self._changed:
            activity.wait_for(self._changed, TRAINERS, lambda: self._closed or self._wanted() is not None)
            self._cursor = (0, 0)

    def behind(self) -> bool:
        """Whether batches are wanted that come before the next one, so that reading has to begin anew."""
        with self._changed:
            return self._behind()

    def send(self, batch: Batch, position: Any = None, meta: Any = None) -> bool:
        """Hand on the next batch, with the source's position behind it; waits for room.

        False: it is not wanted, because reading has to begin anew.
        """
        with self._changed:
            if self._stopped():
                return False
            assert self._cursor is not None
            epoch, index = place = self._cursor
            number = index * self._count + self._index
            owner = number % self._world
            wanted = self._trainers[owner].wants(place)
            if wanted:
                room = lambda: self._stopped() or len(self._trainers[owner].items) < self._bound  # noqa: E731
                activity.wait_for(self._changed, TRAINERS, room)
                if self._stopped():
                    return False
            generation, names = self._generation, self._trainers[owner].ids
        item = None
        if wanted:  # outside of the lock: a worker may take its time
            reference = BatchName(generation, epoch, number)
            rest, worker = self._sent.put(reference, owner, batch, names)
            packed = pack(rest)
            head = {"epoch": epoch, "index": index, "position": position, "meta": meta, "rows": batch.rows}
            if self._statistics.digest:
                head["statistics"] = self._statistics.digest
            if worker is not None:
                head |= {"reference": list(reference), "worker": worker}
            item = Item(epoch, Message({**packed.head, **head}, packed.arrays))
        with self._changed:
            if self._stopped() or generation != self._generation:
                return False
            if item is not None:
                self._trainers[owner].items.append(item)
            for each in self._trainers.values():
                each.filled = max(each.filled, (epoch, index + 1))
            self._cursor = (epoch, index + 1)
            self._positions.append(Known(self._cursor, position))
            self._changed.notify_all()
        activity.advance()
        return True

    def end(self, position: Any = None) -> bool:
        """The epoch has no more batches; `position` is where the next one begins. False as from `send`."""
        with self._changed:
            if self._stopped():
                return False
            assert self._cursor is not None
            epoch, total = self._cursor
            for each in self._trainers.values():
                if each.filled[0] == epoch:
                    if each.filled[1] > total:
                        raise RuntimeError(
                            f"Epoch {epoch} expected {each.filled[1]} batches, as before, got {total}: "
                            "a source without positions must give the same batches every time."
                        )
                    each.end(epoch, total, position)
            self._cursor = (epoch + 1, 0)
            self._positions.append(Known(self._cursor, position))
            self._changed.notify_all()
        return True

    def fail(self, error: BaseException) -> None:
        """Reading has failed: trainers are told, until a new generation of them begins."""
        with self._changed:
            self._error = f"it could not read on: {type(error).__name__}: {error}"
            self._error_code = code_of(error)
            self._changed.notify_all()

    def finish(self) -> None:
        """There will be no more epochs."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_until_told(self, seconds: float) -> None:
        """Wait until all trainers know of the error."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._all(lambda one: one.told or one.left), seconds
            )

    def wait_until_left(self) -> bool:
        """Wait until all trainers have left; False if they need something again."""
        with self._changed:
            activity.wait_for(
                self._changed,
                TRAINERS,
                lambda: self._closed or self._all(lambda one: one.left) or (self._world and self._behind()),
            )
            return self._closed or not self._behind()

    def close(self) -> None:
        """See `Service.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _all(self, true_of: Callable[[TrainerQueue], bool]) -> bool:
        return 0 < self._world == len(self._trainers) and all(map(true_of, self._trainers.values()))

    def _wanted(self) -> Place | None:
        """The oldest place that trainers need something from, if one of them has asked for it."""
        if self._error or not self._all(lambda one: True):
            return None
        target = min(each.filled for each in self._trainers.values())
        return target if max(each.asked for each in self._trainers.values()) >= target[0] else None

    def _behind(self) -> bool:
        if len(self._trainers) < self._world or self._cursor is None:
            return True
        return min(each.filled for each in self._trainers.values()) < self._cursor

    def _stopped(self) -> bool:
        return self._closed or self._behind()
