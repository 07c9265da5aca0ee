"""Ids that a loader has sent to embedding workers, held until no trainer can need them again.

A job with embedding workers splits each batch: its id features go to one of W workers, by the batch's number
modulo W, under a `BatchName`; the trainer gets the rest, with the name and the worker. The loader holds the
ids until the trainer reports that it is done with the batch, to send them again if a worker is replaced. A
loader that replaces another reads the batches again that trainers are not done with, and holds their ids.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from karvan import distributed
from karvan.cluster.batch_messages import pack
from karvan.ragged import REFERENCE, Batch, IdsReference
from karvan.wire import RefusedError, WireError


def require_ids(ids: Sequence[str] | None) -> None:
    """An error if workers would get no ids from loaders: they would be idle, and nobody would notice."""
    if distributed.current().workers is not None and ids is None:
        raise ValueError(
            "This job has embedding workers, but kv.data.from_loaders() does not say which features they "
            'look up: name them, as in kv.data.from_loaders(ids=["user", "item"]), or say ids=[] to '
            "leave the ids in the batches and the workers without work."
        )


class BatchName(NamedTuple):
    """Names the ids of one batch; numbers start at 0 in every epoch."""

    generation: int
    epoch: int
    number: int

    @property
    def name(self) -> str:
        """As embedding workers know it."""
        return f"{self.generation}/{self.epoch}/{self.number}"

    @classmethod
    def named(cls, name: str) -> BatchName:
        """The reference of that name."""
        return cls(*map(int, name.split("/")))


class IdReceiver(Protocol):
    """One embedding worker, as a loader sees it."""

    def put(self, reference: str, ids: Mapping[str, Any]) -> None:
        """Send it the ids of a batch, even if it has them already; waits while it has no room.

        After a WireError it may be called again.
        """

    def begin_forget(self, references: Sequence[str]) -> None:
        """Have it drop batches that nobody will claim, without waiting; where records are leased."""


class SplitIds(Protocol):
    """Splits a batch into ids, for an embedding worker, and the rest, for the trainer."""

    def __call__(self, batch: Batch, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """`names` are the features that the trainer looks up."""


def split_by_name(batch: Batch, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Features of these names are ids; one that is missing is an error."""
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(
            f"A batch expects the id feature '{missing[0]}' that trainers look up, got: {', '.join(batch)}."
        )
    ids = {name: batch[name] for name in names}
    return ids, {name: entry for name, entry in batch.items() if name not in ids}


class SentIds:
    """The ids of batches that trainers are not done with, and the workers that hold them."""

    def __init__(self, workers: Sequence[IdReceiver], split: SplitIds = split_by_name) -> None:
        self._workers = workers
        self._split = split
        self._lock = threading.Lock()
        self._held: dict[BatchName, tuple[int, dict[str, Any]]] = {}  # with the trainer

    def __len__(self) -> int:
        return len(self._held)

    def put(
        self, reference: BatchName, trainer: int, batch: Batch, names: Sequence[str]
    ) -> tuple[Batch, int | None]:
        """Send a batch's ids to their worker; returns the rest, for the trainer, and the worker if any."""
        if not self._workers or not names:
            return batch, None
        ids, rest = self._split(batch, names)
        worker = reference.number % len(self._workers)
        with self._lock:
            self._held[reference] = (trainer, ids)
        self._workers[worker].put(reference.name, ids)
        return Batch(rest), worker

    def hold(self, reference: BatchName, trainer: int, batch: Batch, names: Sequence[str]) -> None:
        """Hold a batch's ids without sending them: its worker has them, or requests them."""
        ids, _ = self._split(batch, names)
        with self._lock:
            self._held[reference] = (trainer, ids)

    def resend(self, reference: BatchName, worker: int) -> None:
        """Send the ids of a batch to a worker again."""
        with self._lock:
            ids = self._held.get(reference)
        if ids is None:
            raise RefusedError(f"expected a batch that its trainer is not done with, got {reference}.")
        if not 0 <= worker < len(self._workers):
            raise RefusedError(f"expected a worker from 0 to {len(self._workers) - 1}, got {worker}.")
        self._workers[worker].put(reference.name, ids[1])

    def done(self, trainer: int, references: Sequence[Sequence[int]]) -> None:
        """A trainer is done with these batches."""
        with self._lock:
            for reference_ in references:
                reference = BatchName(*reference_)
                if reference in self._held and self._held[reference][0] == trainer:
                    del self._held[reference]

    def forget(self, trainer: int | None = None) -> None:
        """Release the ids held for a trainer that restarts, or for all."""
        with self._lock:
            self._held = {
                reference: ids
                for reference, ids in self._held.items()
                if trainer is not None and ids[0] != trainer
            }


# `TaskIds`: sends the ids of the batches of leased tasks to embedding workers.
#
# The ids of a batch go to one of the workers, in turns, under a name that no other batch has; the trainer
# gets the rest, with a reference in their place. Unlike a loader with a fixed share, this one does not hold
# the ids: if a worker is replaced, the trainer has any loader read the same records again, and send their
# ids under the same name to the same worker (`SendTo`). A name ends with a checksum of the ids, so that a
# transform that gives others for the same records is an error, and gradients never reach the rows of other
# ids.
#
# A worker that does not answer is passed over: the next one gets the batch. Batches that were read in advance
# for a trainer that is gone are forgotten; those that it had received expire in the worker.


_log = logging.getLogger("karvan.cluster")

ANSWER_WITHIN = 30.0  # seconds, after which a worker is passed over
_PAUSE = 0.5  # seconds after all workers were lost


class SendTo(NamedTuple):
    """Where the ids of a batch have to go, under which name."""

    worker: int
    name: str


class TaskIds:
    """The embedding workers of the job, or none; split: what of a batch its ids are."""

    def __init__(self, workers: Sequence[IdReceiver] = (), split: SplitIds = split_by_name) -> None:
        self._workers = workers
        self._split = split
        self._process = secrets.token_hex(8)
        self._numbers = itertools.count()

    def send(
        self, batch: Batch, names: Sequence[str], to: SendTo | None, closed: Callable[[], bool]
    ) -> tuple[Batch, IdsReference | None]:
        """Send these features to a worker; the batch for the trainer, and the reference that it contains.

        to: the worker, if it must be this one. closed: whether nobody waits for the batch any more.
        """
        if to is not None and to.worker >= len(self._workers):
            raise RefusedError(f"expected one of {len(self._workers)} embedding workers, got {to.worker}.")
        if not self._workers or not names or not batch.samples:
            return batch, None
        ids, rest = self._split(batch, names)
        number = next(self._numbers)
        checksum = _checksum(ids)
        name = f"{self._process}/{number}/{checksum}" if to is None else to.name
        if name.rpartition("/")[2] != checksum:
            raise ValueError(
                "An embedding worker has lost the ids of a batch: expected to read the same ids again, got "
                "others. The transform of a loader must give the same batch for the same records."
            )
        first, count = (number, len(self._workers)) if to is None else (to.worker, 1)
        for attempt in itertools.count():
            worker = (first + attempt % count) % len(self._workers)
            try:
                self._workers[worker].put(name, ids)
                break
            except WireError as error:
                if closed():
                    raise
                _log.warning("The ids of a batch could not be sent: %s", error)
                if (attempt + 1) % count == 0:
                    time.sleep(_PAUSE)
        reference = IdsReference(worker, name, batch.samples)
        rest[REFERENCE] = reference
        return Batch.trusted(rest, batch.samples), reference

    def forget(self, references: Iterable[IdsReference]) -> None:
        """Nobody will claim these."""
        by_worker: dict[int, list[str]] = {}
        for reference in references:
            by_worker.setdefault(reference.worker, []).append(reference.name)
        for worker, names in by_worker.items():
            self._workers[worker].begin_forget(names)


def _checksum(ids: Mapping[str, Any]) -> str:
    count = 0
    for array in pack(ids).arrays:
        count = zlib.crc32(array.tobytes(), count)
    return f"{count:08x}"
