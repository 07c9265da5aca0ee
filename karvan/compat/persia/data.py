"""`persia.data`: batches from the job's loaders, or of this process, for the context that is entered."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from threading import Thread
from typing import Any

from karvan import distributed
from karvan.argument_checks import check_counts
from karvan.cluster.loader_stream import LoadedBatch
from karvan.compat.persia.batches import (
    PersiaBatch,
    PersiaBatchDataSender,
    PersiaTrainingBatch,
    PyPersiaBatchData,
    local_batch,
)
from karvan.compat.persia.config import unsupported, warn_of_tuning
from karvan.compat.persia.contexts import PREFETCH, BaseCtx, DataCtx, EmbeddingCtx, cnt_ctx
from karvan.compat.persia.env import join_job, wait_for_roles
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role

_LOOKUPS = "lookups run on the cores that there are (KARVAN_THREADS)."


class IterableDatasetBase:
    """Batches for a DataLoader: a subclass has `__iter__`, which gives `PersiaBatch`es.

    It may also have a `consume_dataset` of its own, which sends batches to `sender` and gives a number for
    each of them. buffer_size: how many batches are requested from loaders in advance.
    """

    buffer_size = 10

    def __init__(self, buffer_size: int = 10) -> None:
        check_counts(1, buffer_size=buffer_size)
        self.buffer_size = buffer_size

    @cached_property
    def sender(self) -> PersiaBatchDataSender:
        """Where `consume_dataset` sends batches."""
        return PersiaBatchDataSender()

    def __iter__(self) -> Iterator[PersiaBatch]:
        """One epoch."""
        raise NotImplementedError(f"{type(self).__name__} expects an __iter__ that gives PersiaBatches.")

    def consume_dataset(self) -> Iterator[int]:
        """Send the batches of one epoch, and give their numbers."""
        for number, batch in enumerate(self):
            self.sender.send(batch)
            yield number


class IterableDataset(IterableDatasetBase):
    """Batches that this process makes."""


class StreamingDataset(IterableDatasetBase):
    """Batches that the job's loaders send; one iteration is one epoch, which ends when all loaders have."""


class PersiaDataset(IterableDatasetBase):
    """The dataset of earlier versions: `fetch_data(sender)` sends the batches of an epoch, on a thread."""

    def __init__(self, buffer_size: int = 10, async_iterator: bool = True) -> None:
        super().__init__(buffer_size)
        if not async_iterator:
            raise unsupported("PersiaDataset(async_iterator=False)", "fetch_data runs on a thread.")

    def fetch_data(self, sender: PersiaBatchDataSender) -> None:
        """Send the batches of one epoch."""
        raise NotImplementedError(f"{type(self).__name__} expects a fetch_data that sends PersiaBatches.")


class DataLoader:
    """The batches of a dataset for the context that is entered, with lookups that run in advance.

    timeout_ms: how long a lost loader is waited for. reproducible: batches come in the order of their
    numbers; otherwise as they are ready. embedding_staleness: how many batches may be between a lookup and
    its gradient, 1 for synchronous training; None: as the job says. is_training: False in programs of earlier
    versions, for batches that no context may train on.
    """

    def __init__(
        self,
        dataset: IterableDatasetBase,
        forward_buffer_size: int = PREFETCH,
        timeout_ms: int = 600_000,
        num_workers: int = 10,
        reproducible: bool = False,
        embedding_staleness: int | None = None,
        *,
        is_training: bool = True,
    ) -> None:
        counts = {"forward_buffer_size": forward_buffer_size, "timeout_ms": timeout_ms}
        check_counts(1, **counts, embedding_staleness=embedding_staleness)
        if not isinstance(dataset, IterableDatasetBase):
            raise TypeError(
                f"DataLoader expects a StreamingDataset or an IterableDataset, got {type(dataset).__name__}."
            )
        warn_of_tuning(_LOOKUPS, num_workers=(num_workers, 10))
        if isinstance(dataset, StreamingDataset):
            _check_stream(dataset, is_training)
        self.dataset = dataset
        self._is_training = is_training
        self._ordered = reproducible
        self._timeout = timeout_ms / 1000
        self._data: Any = None
        self._staleness = embedding_staleness
        self._prefetch = forward_buffer_size
        self._context: EmbeddingCtx | None = None
        context = cnt_ctx()
        if context is not None:
            self._open(_embedding_context(context))

    def _open(self, context: EmbeddingCtx) -> None:
        """Connect the context, unless something else has done so before: see `EmbeddingCtx.open`."""
        context.open(self._staleness, self._prefetch)
        if self._prefetch != PREFETCH:
            here = f"this context prepares {context.prefetch} batches in advance since its first use."
            warn_of_tuning(here, forward_buffer_size=(self._prefetch, context.prefetch))
        _check_staleness(self._staleness)
        self._context = context

    def __iter__(self) -> Iterator[PersiaTrainingBatch]:
        context = _embedding_context(cnt_ctx())
        if self._context is None:
            self._open(context)
        if self._data is None:
            self._data = self._make_data(context)
        return context.batches(self._data)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # where the dataset has a length

    def _make_data(self, context: EmbeddingCtx) -> Any:
        if not isinstance(self.dataset, StreamingDataset):
            return _LocalBatches(self.dataset, self._is_training)
        if not join_job():
            raise RuntimeError(
                "StreamingDataset gives the batches that data-loaders send, and this process belongs to no "
                "job: expected a program that persia-launcher nn-worker or karvan launch has started, or "
                "PERSIA_NATS_URL, the address of the job's registry. An IterableDataset gives batches of "
                "this process."
            )
        wait_for_roles(Role.LOADER)
        if not JobEnvironment.read().counts.get(Role.LOADER):
            raise RuntimeError(
                "StreamingDataset gives the batches that data-loaders send, and the job has none: expected "
                "roles.loaders and loader_entry, or persia-launcher data-loader."
            )
        return context.stream(ordered=self._ordered, prefetch=self.dataset.buffer_size, timeout=self._timeout)


# Names of the first generation, one of them as its code spells it.
StreamDataset = StreamingDataset
Dataloader = Dataloder = DataLoader


class _LocalBatches:
    """The batches of a dataset of this process; each iteration is an epoch."""

    def __init__(self, dataset: IterableDatasetBase, is_training: bool) -> None:
        self._dataset = dataset
        self._is_training = is_training

    def __iter__(self) -> Iterator[LoadedBatch]:
        for batch in _batches_of(self._dataset):
            loaded = local_batch(batch.data)
            loaded.meta["requires_grad"] &= self._is_training
            yield loaded


def _batches_of(dataset: IterableDatasetBase) -> Iterator[PersiaBatch | PyPersiaBatchData]:
    """What a dataset sends. It is not a method: programs choose names of their own for what a dataset has."""
    if isinstance(dataset, PersiaDataset):
        yield from _fetched(dataset)
        return
    for _ in dataset.consume_dataset():
        yield dataset.sender.take()


def _fetched(dataset: PersiaDataset) -> Iterator[PersiaBatch | PyPersiaBatchData]:
    """What `fetch_data` sends on a thread; buffer_size batches may wait."""
    sender = PersiaBatchDataSender(dataset.buffer_size)
    errors: list[BaseException] = []

    def fetch() -> None:
        try:
            dataset.fetch_data(sender)
        except BaseException as error:
            errors.append(error)
        sender.end()

    Thread(target=fetch, daemon=True).start()
    try:
        yield from iter(sender.take, None)
    finally:
        sender.close()  # also if the DataLoader was left early
    if errors:
        raise errors[0]


def _check_stream(dataset: StreamingDataset, is_training: bool) -> None:
    """Raise for what would be ignored without a word."""
    if not is_training:
        raise unsupported(
            "DataLoader(StreamingDataset(…), is_training=False)",
            "send batches with PersiaBatch(…, requires_grad=False).",
        )
    for name in ("__iter__", "consume_dataset"):
        if getattr(type(dataset), name) is not getattr(StreamingDataset, name):
            raise unsupported(
                f"{name} of {type(dataset).__name__}, a StreamingDataset",
                "its batches come from data-loaders as they are; an IterableDataset makes its own.",
            )


def _embedding_context(context: BaseCtx | None) -> EmbeddingCtx:
    if context is None or isinstance(context, DataCtx):
        raise RuntimeError("DataLoader expects to be inside of `with TrainCtx(…)` or `with eval_ctx(…)`.")
    return context.embedding()


def _check_staleness(staleness: int | None) -> None:
    connection = distributed.current()
    if staleness is not None and connection.servers is not None and connection.settings.staleness > staleness:
        raise RuntimeError(
            f"The context was connected with staleness {connection.settings.staleness} before this "
            f"DataLoader asked for {staleness}: expected the DataLoader first in its context."
        )
