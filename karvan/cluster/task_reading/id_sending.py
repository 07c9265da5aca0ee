"""`TaskIds`: sends the ids of the batches of leased tasks to embedding workers.

The ids of a batch go to one of the workers, in turns, under a name that no other batch has; the trainer gets
the rest, with a reference in their place. Unlike a loader with a fixed share, this one does not hold the ids:
if a worker is replaced, the trainer has any loader read the same records again, and send their ids under the
same name to the same worker (`SendTo`). A name ends with a checksum of the ids, so that a transform that
gives others for the same records is an error, and gradients never reach the rows of other ids.

A worker that does not answer is passed over: the next one gets the batch. Batches that were read in advance
for a trainer that is gone are forgotten; those that it had received expire in the worker.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from karvan.cluster.batch_messages import pack
from karvan.cluster.loader.id_forwarding import IdReceiver, SplitIds, split_by_name
from karvan.ragged import REFERENCE, Batch, IdsReference
from karvan.wire import RefusedError, WireError

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
        for each in references:
            by_worker.setdefault(each.worker, []).append(each.name)
        for worker, names in by_worker.items():
            self._workers[worker].begin_forget(names)


def _checksum(ids: Mapping[str, Any]) -> str:
    found = 0
    for array in pack(ids).arrays:
        found = zlib.crc32(array.tobytes(), found)
    return f"{found:08x}"
