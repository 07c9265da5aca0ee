"""Ids that a loader has sent to embedding workers, held until no trainer can need them again.

A job with embedding workers splits each batch: its id features go to one of W workers, by the batch's number
modulo W, under a `BatchName`; the trainer gets the rest, with the name and the worker. The loader holds the
ids until the trainer reports that it is done with the batch, to send them again if a worker is replaced. A
loader that replaces another reads the batches again that trainers are not done with, and holds their ids.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from karvan import distributed
from karvan.ragged import Batch
from karvan.wire import RefusedError


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
            held = self._held.get(reference)
        if held is None:
            raise RefusedError(f"expected a batch that its trainer is not done with, got {reference}.")
        if not 0 <= worker < len(self._workers):
            raise RefusedError(f"expected a worker from 0 to {len(self._workers) - 1}, got {worker}.")
        self._workers[worker].put(reference.name, held[1])

    def done(self, trainer: int, references: Sequence[Sequence[int]]) -> None:
        """A trainer is done with these batches."""
        with self._lock:
            for each in references:
                reference = BatchName(*each)
                if reference in self._held and self._held[reference][0] == trainer:
                    del self._held[reference]

    def forget(self, trainer: int | None = None) -> None:
        """Release the ids held for a trainer that restarts, or for all."""
        with self._lock:
            self._held = {
                reference: held
                for reference, held in self._held.items()
                if trainer is not None and held[0] != trainer
            }
