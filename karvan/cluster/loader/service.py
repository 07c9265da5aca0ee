"""`LoaderService`: what each loader answers, whatever it reads; and what it says and sends beside batches.

Every loader has a number, which callers have to expect, and data that its program offers, with the statistics
of transforms. Until then, a question for them is answered by "wait" after a second. What trainers get of the
data depends on who decides which records they train:

- `epoch_service.py`: batches of epochs, each of which belongs to one trainer;
- `task_service.py`: batches of the tasks that trainers have leased (`sharding: dynamic`).

Beside batches, trainers get the statistics of transforms (`LoaderStatistics`), and embedding workers get the
ids of batches (`SentIds` of epochs, `TaskIds` of tasks).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from typing_extensions import override

from karvan import distributed
from karvan.checkpoint import CheckpointError, state_tree
from karvan.checkpoint.checkpoint import COLUMNS, KEY, has_state, name_of
from karvan.checkpoint.recovery import resume
from karvan.cluster.batch_messages import pack
from karvan.data.columns.kinds import ColumnKind
from karvan.errors import DAMAGED, FAILED, TEMPORARY, code_of, mark
from karvan.features import FeatureEngine
from karvan.job.checkpoint_url import local_path
from karvan.protocol.loader import NoAnswerYet, Statistics, Whole
from karvan.ragged import REFERENCE, Batch, IdsReference
from karvan.train.dataset import replace_statistics
from karvan.wire import Message, RefusedError, Request, Service, WireError
from karvan.wire.schema import Head

# Statistics of loaders' fitted transforms: equal in all loaders, and saved by trainers.
#
# A loader transforms batches in its own process, but the trainers' model is useful only together with the
# statistics of that transform.
#
#     trainer                                          loader
#     statistics(whole)                                once its program has started: a digest for each
#                                                        transform, by name, and with `whole` the states as
#                                                        well; "wait" after a second
#
# A trainer asks one loader for the states and the others for digests, before it trains. Loaders that differ
# are an error. Each batch has a digest of the statistics that made it, so a loader that is replaced by one
# with other statistics is an error too. Where the job names a folder of checkpoints, a loader takes the
# statistics of the newest checkpoint: those of its own fit are used only until there is one.


class LoaderStatistics:
    """The states of a loader's transforms, ready to be sent."""

    def __init__(self, packed: Mapping[str, bytes] | None = None) -> None:
        self._packed = dict(packed or {})
        self.digests = {name: hashlib.sha256(state).hexdigest()[:16] for name, state in self._packed.items()}
        self.digest = digest_of(self.digests)

    @classmethod
    def of(
        cls, transforms: Iterable[object], columns: Mapping[str, ColumnKind] | None = None
    ) -> LoaderStatistics:
        """Of the transforms that have statistics, and of the kinds of columns.

        An engine that was not fitted is an error.
        """
        packed: dict[str, bytes] = {}
        if columns:
            packed[COLUMNS] = state_tree.pack({name: list(kind) for name, kind in columns.items()})
        for transform in transforms:
            if not has_state(transform):
                continue
            if isinstance(transform, FeatureEngine):
                transform.require_fitted()
            name, state = name_of(transform), state_tree.pack(transform.state_dict())
            if packed.setdefault(name, state) != state:
                raise ValueError(
                    f"Two transforms with different statistics have the name '{name}': expected one engine, "
                    "or a name for each, FeatureEngine(…, name=…)."
                )
        return cls(packed)

    def message(self, whole: bool) -> Message[Statistics]:
        """The answer to a trainer."""
        states = [np.frombuffer(state, np.uint8) for state in self._packed.values()] if whole else []
        return Message(Statistics(statistics=self.digests), states)


def digest_of(digests: Mapping[str, str]) -> str:
    """One digest for all transforms; empty if there are none."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16] if digests else ""


def ask_loaders(
    ask: Callable[[int, Whole], Message[Statistics]], loaders: Sequence[int]
) -> tuple[dict[str, Any], str]:
    """The states of the loaders' transforms by name, and their digest; an error if loaders differ.

    ask: calls `statistics` of a loader.
    """
    answers = [ask(loader, Whole(whole=loader == loaders[0])) for loader in loaders]
    first = answers[0].head.statistics
    for loader, answer in zip(loaders, answers, strict=True):
        other = answer.head.statistics
        if other != first:
            differ = {name for name in {*first, *other} if first.get(name) != other.get(name)}
            names = sorted(differ - {COLUMNS})
            if not names:
                raise ValueError(
                    f"loader {loaders[0]} and loader {loader} read columns of other names or types: expected "
                    "the same columns in all loaders, from files that all of them see. Declare their types."
                )
            raise ValueError(
                f"loader {loaders[0]} and loader {loader} have different statistics of transform "
                f"'{names[0]}': expected the same in all loaders. In every loader program, fit the engine to "
                "all of the data, engine.fit(kv.data.read(…)), since data.read(…) of a LoaderContext is only "
                "the share of one loader; or take the statistics of a checkpoint, "
                "kv.checkpoint.find(folder).load_transforms(engine)."
            )
    arrays = zip(first, answers[0].arrays, strict=True)
    return {name: state_tree.unpack(array.tobytes()) for name, array in arrays}, digest_of(first)


class SavedStatistics:
    """The statistics of the newest checkpoint of a job's folder, read on first use."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @cached_property
    def _newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The path of the checkpoint and the states in it, if there is one."""
        if not self._folder:
            return None
        # Trainers rename damaged checkpoints when they resume.
        resumed = resume(
            local_path(self._folder), lambda checkpoint: dict(checkpoint.state().get(KEY, {})), rename=False
        )
        return None if resumed is None else (resumed[0].path, resumed[1])

    def give(self, transform: object) -> None:
        """Load what was saved under a transform's name into it, if anything."""
        if not has_state(transform) or self._newest is None:
            return
        (path, states), name = self._newest, name_of(transform)
        if name in states:
            try:
                replace_statistics(transform, states[name])
            except (ValueError, RuntimeError) as error:
                raise CheckpointError(path, f"its transform '{name}' is another: {error}") from error


D = TypeVar("D", bound=Head)


class LoaderService(Service, Generic[D]):
    """Loader number `index`; a head of class `D` says what trainers have to know of its data."""

    progresses = False  # calls are not progress; batches are
    wait: ClassVar[float] = 1.0
    """Seconds until a call is answered, even if there is nothing to send yet."""

    def __init__(self, index: int) -> None:
        self.name = f"loader {index}"
        self._index = index
        self._changed = threading.Condition()
        self._description: D | None = None  # once the program has offered its data
        self._statistics = LoaderStatistics()  # of the transforms; final as soon as there is a description
        self._error = ""
        self._error_code = FAILED
        self.closed = False

    @property
    def statistics(self) -> LoaderStatistics | None:
        """The statistics that trainers receive; None before there is data."""
        return None if self._description is None else self._statistics

    def fail(self, error: BaseException) -> None:
        """Reading has failed: trainers get the error, until a new generation of them starts."""
        self.note_failure(error)
        with self._changed:
            self._error = f"it could not continue reading: {type(error).__name__}: {error}"
            self._error_code = code_of(error)
            self._changed.notify_all()

    @override
    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _describe_data(self, description: D, statistics: LoaderStatistics | None) -> None:
        """Answer questions for the data from now on."""
        with self._changed:
            self._description, self._statistics = description, statistics or LoaderStatistics()
            self._changed.notify_all()

    def _described(self) -> D | None:
        """The description of the data, once the program has started; None if that takes longer."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.closed or self._error or self._description is not None, self.wait
            )
            if self._description is None and self._error:
                raise self._failure()
            return self._description

    def _answer_description(self, call: Request[Head]) -> Message[D | NoAnswerYet]:
        return Message(self._described() or NoAnswerYet(wait=True))

    def _answer_statistics(self, call: Request[Whole]) -> Message[Any]:
        if self._described() is None:
            return Message(NoAnswerYet(wait=True))
        return self._statistics.message(call.head.whole)

    def _failure(self) -> RuntimeError:
        """The error for trainers: an outage of the data, damage, or a fault of the reading program."""
        error = RuntimeError(self._error)
        if self._error_code in (DAMAGED, TEMPORARY):
            mark(error, self._error_code == TEMPORARY)
        return error


# Ids that a loader has sent to embedding workers, held until no trainer can need them again.
#
# A job with embedding workers splits each batch: its id features go to one of W workers, by the batch's
# number modulo W, under a `BatchName`; the trainer gets the rest, with the name and the worker. The loader
# holds the ids until the trainer reports that it is done with the batch, to send them again if a worker is
# replaced. A loader that replaces another reads the batches again that trainers are not done with, and holds
# their ids.


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


# Splits a batch into ids, for an embedding worker, and the rest, for the trainer. The names are those of the
# features that the trainer looks up.
SplitIds = Callable[[Batch, Sequence[str]], tuple[dict[str, Any], dict[str, Any]]]


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
